"""One look of the long time scale reaches router and engine; and what a node tells its router of itself."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec
from prfaas.engine.options import EngineOptions
from prfaas.engine.submission import EngineLoad
from prfaas.scheduler.curves import PolynomialCurve
from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.profile import Prior
from prfaas.scheduler.router import Router
from prfaas.server.adapting import Adapting
from prfaas.server.places import bytes_of_places, places_of_snapshots
from prfaas.server.routing import PromptRouter
from prfaas.types import Request, SamplingParams

if TYPE_CHECKING:
    from prfaas.server.engine_thread import EngineThread

OPTIONS = SchedulerOptions(rebalance_prompts=20, rebalance_dwell_s=0.0)
LAYOUT = CacheLayout(
    block_tokens=64,
    groups=(
        FullSpec(name="full", layers=(0,), page_bytes=640),
        StateSpec(name="state", layers=(1,), page_bytes=500, state_bytes=1000),
    ),
)


@dataclass
class StubEngine:
    """The part of the engine thread that is asked."""

    shares: list[float] = field(default_factory=list)
    chunk_s: float | None = 0.5
    rate: float = 1000.0
    num_waiting_tokens: int = 0
    num_waiting: int = 0

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=0,
            num_waiting=self.num_waiting,
            num_waiting_tokens=self.num_waiting_tokens,
            kv_used_bytes=0,
            prefill_tokens_per_s=self.rate,
            step_count=1,
            num_decoding=4,
            decode_step_s=0.05,
            prefill_chunk_s=self.chunk_s,
        )

    def set_prefill_share(self, share: float) -> None:
        self.shares.append(share)


def made(
    engine: StubEngine, options: SchedulerOptions = OPTIONS, prior: Prior | None = None
) -> tuple[Adapting, Router]:
    router = Router(peers=("p:1",), options=options)
    router.heard("p:1", now_s=0.0, is_ready=True, prefill_tokens_per_s=4000.0)
    adapting = Adapting(
        router=router,
        engine=cast("EngineThread", engine),
        engine_options=EngineOptions(),
        layout=LAYOUT,
        clock=lambda: 1.0,
        prior=prior,
    )
    return adapting, router


def asked(num_tokens: int) -> Request:
    return Request(
        request_id="r",
        prompt_tokens=(1,) * num_tokens,
        sampling=SamplingParams(max_tokens=1, seed=0),
    )


def test_looks_move_the_router_s_threshold_and_the_engine_s_share():
    engine = StubEngine()
    adapting, router = made(engine)
    for length in range(20):
        adapting.saw(1000 + length, 4000)
    found = [adapting.look() for _ in range(4)][-1]
    assert found.threshold_tokens == router.threshold_tokens != 512
    assert engine.shares == [adapting.prefill_share]
    assert adapting.prefill_share == found.prefill_share < 1.0


def test_what_was_set_stays_and_an_engine_of_which_nothing_is_known_keeps_its_share():
    engine = StubEngine(chunk_s=None)
    adapting, router = made(engine, SchedulerOptions(threshold_tokens=99, rebalance_prompts=20))
    for _ in range(20):
        adapting.saw(1000, 4000)
    for _ in range(5):
        adapting.look()
    assert router.threshold_tokens == 99
    assert engine.shares == []


@pytest.mark.parametrize("computed", [64, 1000, 16_000])
@pytest.mark.parametrize("asked_for", [(64, 128), (1000, 4000), (4000, 20_000)], ids=str)
def test_t_does_not_depend_on_how_long_the_prompts_are_that_showed_the_rates(computed, asked_for):
    """A prefill has a fixed part: short ones reach little of the rate of long ones, here and at a peer."""

    def local_s(tokens: float) -> float:
        return 1.0 + 1e-4 * tokens

    options = SchedulerOptions(rebalance_prompts=20)
    engine = StubEngine(chunk_s=EngineOptions().most_mixed_tokens * local_s(computed) / computed)
    prior = Prior(prefill_s=PolynomialCurve(coefficients=(1.0, 1e-4)))
    adapting, router = made(engine, options, prior)
    routes = prompt_router(engine, router, prior=prior, adapting=adapting)
    for number in range(50):
        routes.route(asked(computed), 0, force="local")
        routes.route(asked(asked_for[number % 2]), 0, force="remote")
        rate = asked_for[number % 2] / (local_s(asked_for[number % 2]) / 4)
        routes.ended(
            "r",
            "completed",
            rates=TransferRates(prefill_tokens_per_s=rate, link_bytes_per_s=None),
        )
        adapting.saw(2000 + 1000 * (number % 20), 1)
    observed = adapting._observed()
    mean_tokens = 11_500
    assert observed.prefill_tokens_per_s == pytest.approx(mean_tokens / local_s(mean_tokens))
    assert observed.peer_tokens_per_s == pytest.approx(
        4 * mean_tokens / local_s(mean_tokens), rel=1e-6 if asked_for[1] > 10**3 else 0.6
    )


def prompt_router(engine: StubEngine, router: Router, **changes: object) -> PromptRouter:
    values: dict[str, object] = {
        "router": router,
        "engine": engine,
        "layout": LAYOUT,
        "clock": lambda: 1.0,
    }
    return PromptRouter(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("hit_tokens", [0, 640, 960])
@pytest.mark.parametrize("snapshot_tokens", [0, 64, 512, 1 << 16])
@pytest.mark.parametrize("num_tokens", [1028, 1088])
def test_the_link_is_charged_with_states_at_the_end_and_with_snapshots(
    num_tokens, hit_tokens, snapshot_tokens
):
    _, router = made(StubEngine())
    router.measured("p:1", rtt_s=None, bytes_per_s=1.0)
    routes = prompt_router(StubEngine(rate=0.0), router, snapshot_tokens=snapshot_tokens)
    route = routes.route(asked(num_tokens), hit_tokens, force="remote")
    places = places_of_snapshots(LAYOUT, num_tokens, hit_tokens, snapshot_tokens)
    num_bytes = LAYOUT.bytes_needed(num_tokens, hit_tokens) + bytes_of_places(LAYOUT, places)
    assert route.predicted_ttft_s == pytest.approx(num_bytes)
    assert router.peer("p:1").num_inflight_bytes == num_bytes
    routes.ended("r", "cancelled")
    assert router.peer("p:1").num_inflight == 0


def test_a_profile_that_is_wrong_of_this_machine_is_corrected_by_what_it_shows():
    _, router = made(StubEngine())
    prior = Prior(prefill_s=PolynomialCurve(coefficients=(0.0, 1e-3, 1e-6)))
    engine = StubEngine(rate=0.0)
    routes = prompt_router(engine, router, prior=prior)
    assert routes.local_view(1000).prefill_tokens_per_s == pytest.approx(500)
    routes.route(asked(1000), 0, force="local")
    engine.rate = 250.0
    assert routes.local_view(1000).prefill_tokens_per_s == pytest.approx(250)
    assert routes.local_view(4000).prefill_tokens_per_s == pytest.approx(100)


def test_prompts_that_wait_here_count_against_this_node():
    _, router = made(StubEngine())
    engine = StubEngine(num_waiting_tokens=5000, num_waiting=3)
    routes = prompt_router(engine, router)
    view = routes.local_view(100)
    assert (view.num_waiting_tokens, view.num_waiting) == (5000, 3)
    assert routes.route(asked(400), 0).reason == "earlier"
    routes.ended("r", "cancelled")


def test_every_request_that_is_done_is_told_to_the_long_time_scale():
    engine = StubEngine()
    adapting, router = made(engine)
    routes = prompt_router(engine, router, adapting=adapting)
    prompt_router(engine, router).saw(1, 1)  # to nobody
    for length in range(20):
        routes.saw(1000 + length, 4000)
    adapting.look()
    assert adapting.look().threshold_tokens is not None

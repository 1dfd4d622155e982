"""A node predicts by its profile until it has observed something itself."""

import pytest

from prfaas.config.kv_layout import layout_lines
from prfaas.config.options import NodeConfig
from prfaas.config.profiles import read_profile
from prfaas.engine.options import EngineOptions
from prfaas.engine.rate import MEMORY_TOKENS
from prfaas.errors import ConfigError
from prfaas.scheduler.curves import LinearCurve, PolynomialCurve
from prfaas.scheduler.profile import Link, Prior
from prfaas.server.pd import load_pd_node
from prfaas.server.prior import expected_tokens_per_s, read_prior
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams
from tests.config.plan_files import PROFILE, changed, toml
from tests.engine.replaying import HYBRID
from tests.server.fleet import CountedTransfers
from tests.server.real_nodes import RealNodes, no_progress
from tests.server.replay_nodes import LOCAL, REMOTE, replay_config, replay_nodes

SPEED = 200.0
LINK = {"bytes_per_s": 2e7, "rtt_s": 0.03, "provenance": "measured", "source": "a test"}


def config_with(path) -> NodeConfig:
    return NodeConfig(engine=EngineOptions(profile=str(path)))


def write_profile(path, *kv_lines: str) -> None:
    tables = toml(changed(changed(PROFILE, "link", LINK), "kv", {}))
    path.write_text("\n".join([tables, *kv_lines]))


async def record_of(
    nodes: RealNodes, name: str, route: RouteName, num_tokens: int
) -> RequestRecord:
    asked = Request(
        request_id=name,
        prompt_tokens=tuple(place % 250 for place in range(num_tokens)),
        sampling=SamplingParams(max_tokens=1, seed=0),
        cache_salt=name.encode(),
    )
    async with nodes.pd.generate(asked, force_route=route) as generation:
        async for _ in generation:
            pass
    return generation.record


async def test_first_answers_are_predicted_by_the_profiles_and_later_ones_by_what_was_seen():
    local, remote = read_profile(LOCAL), read_profile(REMOTE)
    async with replay_nodes(speed=SPEED) as nodes:
        first = await record_of(nodes, "a", "remote", 1_000)
        compute_s = 1_000 * remote.prefill_s(MEMORY_TOKENS) / MEMORY_TOKENS / SPEED
        assert first.predicted_ttft_s is not None
        assert first.predicted_ttft_s >= compute_s * (1 - 1e-9)  # and a round trip
        num_tokens = 500
        record = await record_of(nodes, "b", "local", num_tokens)
        expected_s = local.prefill_s(num_tokens) / SPEED
        assert record.predicted_ttft_s == pytest.approx(expected_s)
        observed = nodes.pd._engine.load().prefill_tokens_per_s
        assert observed > 0
        seen = await record_of(nodes, "c", "local", 2_000)
        as_promised = observed / (num_tokens / local.prefill_s(num_tokens))
        assert seen.predicted_ttft_s == pytest.approx(local.prefill_s(2_000) / as_promised)


async def test_the_router_expects_the_measured_link(tmp_path):
    path = tmp_path / "p.toml"
    write_profile(path, *layout_lines(HYBRID))
    node = load_pd_node(
        replay_config("pd", path, peer="127.0.0.1:9", bytes_scale=1.0),
        CountedTransfers(),
        no_progress,
    )
    assert node._router.peer("127.0.0.1:9").expected_link == Link(bytes_per_s=2e7, rtt_s=0.03)
    await node.close()


def test_a_profile_of_the_model_is_taken_and_of_another_one_refused(tmp_path):
    path = tmp_path / "p.toml"
    write_profile(path, *layout_lines(HYBRID))
    prior = read_prior(config_with(path), HYBRID)
    assert prior is not None
    assert prior.link == Link(bytes_per_s=2e7, rtt_s=0.03)
    assert prior.prefill_tokens_per_s(1000) == 1000 / 0.5
    assert prior.prefill_tokens_per_s(0) is None
    assert expected_tokens_per_s(prior) == prior.prefill_tokens_per_s(MEMORY_TOKENS)
    write_profile(path, "[[kv.groups]]", 'kind = "full"', "layers = [0]", "bytes_per_token = 8")
    with pytest.raises(
        ConfigError, match=r"profile p keeps 32,768 bytes for 4096 tokens, this model \d"
    ):
        read_prior(config_with(path), HYBRID)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (LinearCurve(tokens=(100.0, 1000.0), values=(1.0, 5.0)), 1000 / 5),
        (LinearCurve(tokens=(100.0, 10_000.0), values=(1.0, 100.0)), 4096 / 40.96),
        (PolynomialCurve(coefficients=(0.0, 0.01)), 100.0),
        (LinearCurve(tokens=(0.5,), values=(1.0,)), 1.0),
    ],
)
def test_the_rate_told_to_peers_is_of_no_longer_prompts_than_were_measured(curve, expected):
    assert expected_tokens_per_s(Prior(prefill_s=curve)) == pytest.approx(expected)
    assert expected_tokens_per_s(Prior(prefill_s=curve, speed=2.0)) == pytest.approx(2 * expected)


def test_without_a_profile_nothing_is_expected():
    assert read_prior(NodeConfig(), HYBRID) is None
    assert expected_tokens_per_s(None) == 0

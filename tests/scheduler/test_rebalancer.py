"""Roles follow the prompts, slowly."""

from itertools import pairwise
from random import Random

import pytest

from prfaas.scheduler.planner import plan
from prfaas.scheduler.rebalancer import RebalanceOptions, Rebalancer
from prfaas.scheduler.throughput import Shape
from tests.scheduler.planning import model

OPTIONS = RebalanceOptions(num_prompts=200, confirmations=3, dwell_s=100.0)
MODEL = model()
BEST = plan(MODEL, "prfaas", num_prfaas=4, num_local=8).shape


def seeing(rebalancer: Rebalancer, seed: int, num: int = 200, outputs: int = 1024) -> Rebalancer:
    random = Random(seed)
    tokens = MODEL.workload.lengths.tokens
    for _ in range(num):
        rebalancer.saw(round(random.choice(tokens)), outputs)
    return rebalancer


def make(kind="prfaas") -> Rebalancer:
    return Rebalancer(MODEL, kind, OPTIONS)


def moved(shape: Shape, to: str | None) -> Shape:
    step = {"prefill": 1, "decode": -1, None: 0}[to]
    return Shape(
        num_prfaas=shape.num_prfaas,
        num_prefill=shape.num_prefill + step,
        num_decode=shape.num_decode - step,
    )


@pytest.mark.parametrize("num_prefill", [1, 7])
def test_wrong_roles_come_to_the_plan_one_at_a_time_with_dwell_between(num_prefill):
    rebalancer, changes = seeing(make(), 0), []
    shape = Shape(num_prfaas=4, num_prefill=num_prefill, num_decode=8 - num_prefill)
    for look in range(200):
        found = rebalancer.look(shape, look * 20.0)
        if found.to is not None:
            changes.append(look * 20.0)
        shape = moved(shape, found.to)
    assert abs(shape.num_prefill - BEST.num_prefill) <= 1
    assert len(changes) >= abs(num_prefill - BEST.num_prefill) - 1
    assert all(late - early >= 100.0 for early, late in pairwise(changes))
    assert changes[0] == 40.0, "the third look that wants it"


def test_noise_makes_nothing_flap():
    rebalancer, shape, changes = make(), BEST, 0
    for look in range(100):
        seeing(rebalancer, look, num=60)
        found = rebalancer.look(shape, look * 60.0)
        changes += found.to is not None
        shape = moved(shape, found.to)
    assert changes <= 1


def test_longer_answers_want_more_decode():
    rebalancer = seeing(make(), 0, outputs=4096)
    looks = [rebalancer.look(BEST, now_s) for now_s in (0.0, 1.0, 2.0)]
    assert [look.to for look in looks] == [None, None, "decode"]
    assert looks[0].gain_fraction > OPTIONS.min_gain_fraction


def test_the_threshold_is_the_best_of_the_roles_as_they_are():
    found = seeing(make(), 0).look(BEST, 0.0)
    planned = plan(MODEL, "prfaas", num_prfaas=4, num_local=8).threshold_tokens
    assert found.threshold_tokens == pytest.approx(planned, rel=0.25)
    assert (
        seeing(make("homogeneous"), 0)
        .look(Shape(num_prefill=6, num_decode=2), 0.0)
        .threshold_tokens
        is None
    )


def test_few_prompts_and_a_deployment_without_choice_change_nothing():
    wrong = Shape(num_prfaas=4, num_prefill=1, num_decode=7)
    few = seeing(make(), 0, num=49)
    naive = seeing(make("naive"), 0)
    for look in range(10):
        assert few.look(wrong, look * 100.0).to is None
        assert naive.look(Shape(num_prfaas=4, num_decode=8), look * 100.0).to is None


def test_no_role_is_emptied():
    rebalancer = seeing(make(), 0, outputs=100_000)
    shape = Shape(num_prfaas=4, num_prefill=1, num_decode=1)
    assert all(rebalancer.look(shape, look * 200.0).to is None for look in range(10))

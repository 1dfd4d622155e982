"""What a request's state says of its ends and needs."""

from dataclasses import replace

import pytest

from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec
from prfaas.engine.sequence import RequestState, check_submission
from prfaas.engine.submission import Submission
from prfaas.errors import BadRequest
from prfaas.types import Request, SamplingParams
from tests.engine.running import Node, prompt_of, tiny

SAMPLING = SamplingParams(max_tokens=5, seed=0, stop_token_ids=(7, 9))


@pytest.fixture
def submission():
    node = Node(tiny("llama", "float32"))
    prompt = prompt_of(20)
    table = node.lookup(prompt)
    yield Submission(
        request=Request(request_id="r", prompt_tokens=prompt, sampling=SAMPLING, num_choices=2),
        table=table,
    )
    table.release()


def state_of(submission: Submission) -> RequestState:
    return RequestState(submission=submission, max_total_tokens=25, open_choices=[0, 1])


def changed(submission: Submission, **fields) -> Submission:
    return replace(submission, request=replace(submission.request, **fields))


def check(submission: Submission) -> None:
    check_submission(submission, vocab_size=512, max_context_tokens=64, block_tokens=16)


def test_a_choice_ends_at_a_stop_token_or_at_its_length(submission):
    state = state_of(submission)
    assert state.finish_reason(7, 21) == "stop"
    assert state.finish_reason(8, 24) is None
    assert state.finish_reason(8, 25) == "length"
    assert state.finish_reason(9, 25) == "stop"


def test_first_logits_are_needed_unless_every_open_choice_has_a_token(submission):
    assert state_of(submission).needs_first_logits
    half = replace(submission, forced_tokens=((3,), ()))
    assert state_of(half).needs_first_logits
    both = replace(submission, forced_tokens=((3,), (4,)))
    assert not state_of(both).needs_first_logits
    assert state_of(replace(both, return_logits=True)).needs_first_logits
    only_first = state_of(half)
    only_first.open_choices = [0]
    assert not only_first.needs_first_logits


def test_a_history_is_kept_for_penalties_only(submission):
    assert state_of(submission).new_history((1,)) is None
    sampling = replace(SAMPLING, presence_penalty=0.5)
    assert state_of(changed(submission, sampling=sampling)).new_history((1,)) is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_tokens": ()}, "empty"),
        ({"prompt_tokens": (1,) * 64}, "has 64 tokens; the context takes 64"),
        ({"prompt_tokens": (5, -1)}, r"outside 0\.\.511"),
        ({"prompt_tokens": (512,)}, r"outside 0\.\.511"),
        ({"sampling": replace(SAMPLING, logit_bias=((-1, 1.0),))}, r"outside 0\.\.511"),
        ({"sampling": replace(SAMPLING, max_tokens=0)}, "max_tokens = 0"),
        ({"num_choices": 0}, "n = 0"),
    ],
)
def test_what_the_client_must_change_is_named(submission, fields, message):
    with pytest.raises(BadRequest, match=message):
        check(changed(submission, **fields))


@pytest.mark.parametrize("snapshot_tokens", [-16, 8, 17, 40])
def test_snapshots_off_the_block_grid_are_refused_by_name(submission, snapshot_tokens):
    with pytest.raises(BadRequest, match=f"snapshot_tokens = {snapshot_tokens} .* of 16 tokens"):
        check(replace(submission, snapshot_tokens=snapshot_tokens))


def test_what_fits_is_accepted(submission):
    check(replace(submission, snapshot_tokens=48))
    check(submission)
    check(changed(submission, prompt_tokens=(511,) * 63))


def test_where_logits_are_wanted_a_state_is_only_of_use_at_a_boundary(submission):
    full = FullSpec(name="full", layers=(0,), page_bytes=64)
    state = StateSpec(name="state", layers=(1,), page_bytes=64, state_bytes=64)
    attention = CacheLayout(block_tokens=16, groups=(full,))
    hybrid = CacheLayout(block_tokens=16, groups=(full, state))
    reusable = [state_of(submission).num_reusable(layout) for layout in (attention, hybrid)]
    assert reusable == [19, 16]
    forced = state_of(replace(submission, forced_tokens=((3,), (4,))))
    assert [forced.num_reusable(layout) for layout in (attention, hybrid)] == [20, 20]

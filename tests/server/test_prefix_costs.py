"""What a peer that lacks our prefix needs at least, to the byte; and where it is given up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.view import PeerView
from prfaas.server.prefix_costs import is_worth_waiting, least_work_s
from tests.server.scripted_engine import BLOCK_TOKENS, DENSE, HYBRID, STATES

TOKENS_PER_S = 100.0
BYTES_PER_S = 1000.0
RTT_S = 0.25


def peer(tokens_per_s: float | None = TOKENS_PER_S) -> PeerView:
    return PeerView(
        peer="p",
        prefill_tokens_per_s=tokens_per_s,
        link_bytes_per_s=BYTES_PER_S,
        rtt_s=RTT_S,
        num_queue_tokens=10**6,
    )


def test_a_model_of_states_is_charged_its_states_behind_all_of_its_prefill():
    """Two layers of full attention, 64 bytes a token each; two layers with states of 1200 bytes."""
    num_tokens, have_tokens = 10 * BLOCK_TOKENS + 3, 8 * BLOCK_TOKENS
    work_s = least_work_s(
        peer(),
        STATES,
        num_tokens=num_tokens,
        have_tokens=have_tokens,
        peer_hit_tokens=2 * BLOCK_TOKENS,
        snapshot_tokens=0,
    )
    computed_s = (num_tokens - 2 * BLOCK_TOKENS) / TOKENS_PER_S
    streamed_s = 2 * 64 * (num_tokens - have_tokens) / BYTES_PER_S
    # That at the prompt's end and that at the last boundary before it.
    states_s = 2 * 2 * 1200 / BYTES_PER_S
    assert work_s == pytest.approx(max(computed_s, streamed_s) + states_s + RTT_S)


def test_snapshots_on_the_way_are_charged_to_the_link():
    num_tokens, have_tokens = 40 * BLOCK_TOKENS, BLOCK_TOKENS

    def work_s(snapshot_tokens: int) -> float:
        found = least_work_s(
            peer(1e9),
            STATES,
            num_tokens=num_tokens,
            have_tokens=have_tokens,
            peer_hit_tokens=0,
            snapshot_tokens=snapshot_tokens,
        )
        assert found is not None
        return found

    # At 10, 20 and 30 blocks: that at 40 is the prompt's end.
    assert work_s(10 * BLOCK_TOKENS) - work_s(0) == pytest.approx(3 * 2 * 1200 / BYTES_PER_S)


@given(
    layout=st.sampled_from([DENSE, HYBRID, STATES]),
    num_tokens=st.integers(1, 400),
    have=st.floats(0, 1),
    peer_has=st.floats(0, 1),
)
def test_no_peer_is_quicker_than_its_prefill_or_than_the_link(layout, num_tokens, have, peer_has):
    have_tokens = int(have * (num_tokens - 1)) // BLOCK_TOKENS * BLOCK_TOKENS
    peer_hit_tokens = int(peer_has * have_tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    work_s = least_work_s(
        peer(),
        layout,
        num_tokens=num_tokens,
        have_tokens=have_tokens,
        peer_hit_tokens=peer_hit_tokens,
        snapshot_tokens=0,
    )
    assert work_s is not None
    computed_s = (num_tokens - peer_hit_tokens) / TOKENS_PER_S
    moved_s = layout.bytes_needed(num_tokens, have_tokens) / BYTES_PER_S
    assert work_s >= max(computed_s, moved_s)
    assert work_s <= computed_s + moved_s + RTT_S + 1e-9


def test_it_is_given_up_where_it_needs_more_than_a_local_prefill_and_not_where_as_much():
    assert is_worth_waiting(2.0, 2.0)
    assert not is_worth_waiting(math.nextafter(2.0, 3.0), 2.0)
    assert is_worth_waiting(1e9, None)
    assert is_worth_waiting(None, 0.0)


def test_a_peer_of_unknown_speed_is_waited_for():
    work_s = least_work_s(
        peer(None), STATES, num_tokens=100, have_tokens=64, peer_hit_tokens=0, snapshot_tokens=0
    )
    assert work_s is None

"""The delta rule's chunks against its sequential form in float64.

Tolerances are relative to the largest value, in float32, for C = 64.
"""

import pytest
import torch
from torch import Tensor

from prfaas.engine.layers import delta
from prfaas.engine.layers.conv import CausalConv
from prfaas.engine.layers.delta import DeltaRecurrence, DeltaRows, fold_in_order
from prfaas.engine.layers.delta_scores import channel_scores, head_scores, inverse_unit_lower
from prfaas.engine.recurrence import CHUNK_TOKENS
from prfaas.engine.states import State
from tests.engine.layers.mixing import (
    relative_error,
    same_bits,
    scan,
    steps,
)

TYPICAL_TOLERANCE = 1.5e-6
LIKE_KEYS_TOLERANCE = 6e-6
KEY_DIM, VALUE_DIM = 48, 40
EACH_DECAY = pytest.mark.parametrize("is_by_channel", [False, True])


def make_rows(
    is_by_channel: bool,
    *,
    num_tokens: int = 3 * CHUNK_TOKENS,
    key_heads: int = 4,
    heads: int = 4,
    strongest: float = 1.0,
    likeness: float = 0.0,
    beta: float | None = None,
    seed: int = 0,
) -> DeltaRows:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    k = random(num_tokens, key_heads, KEY_DIM) + likeness * random(1, key_heads, KEY_DIM)
    q = random(num_tokens, key_heads, KEY_DIM)
    decays = KEY_DIM if is_by_channel else 1
    return DeltaRows(
        q=torch.nn.functional.normalize(q, dim=2) * KEY_DIM**-0.5,
        k=torch.nn.functional.normalize(k, dim=2),
        v=random(num_tokens, heads, VALUE_DIM),
        g=-strongest * torch.rand(num_tokens, heads, decays, generator=generator) ** 4,
        beta=torch.rand(num_tokens, heads, generator=generator)
        if beta is None
        else torch.full((num_tokens, heads), beta),
    )


def in_float64(rows: DeltaRows) -> DeltaRows:
    return DeltaRows(
        q=rows.q.double(),
        k=rows.k.double(),
        v=rows.v.double(),
        g=rows.g.double(),
        beta=rows.beta.double(),
    )


def fold_chunks(rows: DeltaRows, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    out_THV = torch.full_like(rows.v, torch.nan)
    return out_THV, delta.fold_chunks(rows, state_HKV, out_THV)


def written_out(rows: DeltaRows, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and the state by the rule's matrices, one head at a time."""
    outs = torch.empty_like(rows.v)
    state_HKV = state_HKV.clone()
    per_key_head = rows.v.shape[1] // rows.k.shape[1]
    for head, state_KV in enumerate(state_HKV):
        for token in range(len(rows.v)):
            q_K = rows.q[token, head // per_key_head]
            k_K = rows.k[token, head // per_key_head]
            beta = rows.beta[token, head]
            forget_KK = torch.eye(len(k_K)).double() - beta * torch.outer(k_K, k_K)
            decay_K = rows.g[token, head].exp().expand(len(k_K))
            write_KV = beta * torch.outer(k_K, rows.v[token, head])
            state_KV.copy_(forget_KK @ (torch.diag(decay_K) @ state_KV) + write_KV)
            outs[token, head] = state_KV.T @ q_K
    return outs, state_HKV


@EACH_DECAY
@pytest.mark.parametrize("heads", [4, 8])
def test_the_sequential_form_is_the_rule_written_out_as_matrices(
    is_by_channel: bool, heads: int
) -> None:
    rows = in_float64(make_rows(is_by_channel, num_tokens=20, heads=heads))
    state = torch.randn(heads, KEY_DIM, VALUE_DIM).double()
    out, last = fold_in_order(rows, state)
    expected, expected_last = written_out(rows, state)
    assert relative_error(out, expected) < 1e-13
    assert relative_error(last, expected_last) < 1e-13


@EACH_DECAY
@pytest.mark.parametrize(
    ("strongest", "likeness", "beta", "tolerance"),
    [
        (1.0, 0.0, None, TYPICAL_TOLERANCE),
        (0.01, 0.0, None, TYPICAL_TOLERANCE),
        (0.0, 0.0, 1.0, TYPICAL_TOLERANCE),
        (80.0, 0.0, None, TYPICAL_TOLERANCE),
        (1000.0, 0.0, None, TYPICAL_TOLERANCE),
        (1e-3, 9.0, 0.999, LIKE_KEYS_TOLERANCE),
        (80.0, 9.0, 0.999, LIKE_KEYS_TOLERANCE),
        (0.0, 1e6, 1.0, LIKE_KEYS_TOLERANCE),
    ],
)
def test_chunks_equal_the_float64_recurrence(
    is_by_channel: bool, strongest: float, likeness: float, beta: float | None, tolerance: float
) -> None:
    rows = make_rows(is_by_channel, strongest=strongest, likeness=likeness, beta=beta)
    state = torch.randn(4, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(1))
    expected, expected_last = fold_in_order(in_float64(rows), state.double())
    out, last = fold_chunks(rows, state)
    assert relative_error(out, expected) < tolerance
    assert relative_error(last, expected_last) < tolerance


@EACH_DECAY
def test_a_weak_decay_after_a_very_strong_one_keeps_its_precision(is_by_channel: bool) -> None:
    rows = make_rows(is_by_channel, strongest=0.05)
    rows.g[::7] = -1e4  # a difference of sums this large has lost the small decays in float32
    state = torch.zeros(4, KEY_DIM, VALUE_DIM)
    expected, _ = fold_in_order(in_float64(rows), state.double())
    assert relative_error(fold_chunks(rows, state)[0], expected) < TYPICAL_TOLERANCE


@EACH_DECAY
def test_betas_up_to_two_and_shared_key_heads_are_computed(is_by_channel: bool) -> None:
    heads = 4 if is_by_channel else 12
    rows = make_rows(is_by_channel, heads=heads, strongest=0.1)
    rows.beta.mul_(2.0)
    state = torch.zeros(heads, KEY_DIM, VALUE_DIM)
    expected, expected_last = fold_in_order(in_float64(rows), state.double())
    out, last = fold_chunks(rows, state)
    assert relative_error(out, expected) < TYPICAL_TOLERANCE
    assert relative_error(last, expected_last) < TYPICAL_TOLERANCE


def test_one_decay_in_all_channels_scores_like_the_decay_of_a_head() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, CHUNK_TOKENS, KEY_DIM, generator=generator)
    g = -torch.rand(2, 3, CHUNK_TOKENS, 1, generator=generator)
    by_head = head_scores(q, k, g)
    by_channel = channel_scores(q, k, g.repeat(1, 1, 1, KEY_DIM))
    for name in ("keys", "queries"):
        assert relative_error(getattr(by_channel, name), getattr(by_head, name)) < 1e-6
    for name in ("from_start", "to_end"):
        assert relative_error(getattr(by_channel, name)[..., :1], getattr(by_head, name)) < 1e-6


def test_the_inverse_of_like_keys_and_full_betas_does_not_blow_up() -> None:
    below = torch.ones(2, 1, CHUNK_TOKENS, CHUNK_TOKENS).tril(-1) * 0.999
    inverse = inverse_unit_lower(below)
    unit = inverse.double() @ (torch.eye(CHUNK_TOKENS) + below).double()
    assert (unit - torch.eye(CHUNK_TOKENS)).abs().max() < 1e-6
    assert inverse.abs().max() <= 1.0


def make_core(is_by_channel: bool) -> DeltaRecurrence:
    channels = 2 * 2 * 16 + 2 * 24
    weight = torch.randn(4, channels, generator=torch.Generator().manual_seed(5))
    return DeltaRecurrence(
        CausalConv(weight, has_silu=True),
        num_key_heads=2,
        num_value_heads=2,
        key_dim=16,
        value_dim=24,
        decays_per_head=16 if is_by_channel else 1,
    )


def core_rows(core: DeltaRecurrence, num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, core.row_dim, generator=generator)
    channels = 2 * 2 * 16 + 2 * 24
    rows[:, channels : channels + 2].sigmoid_()
    rows[:, channels + 2 :].abs_().neg_()
    return rows


def core_state(seed: int = 3) -> State:
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(3, 2 * 2 * 16 + 2 * 24, generator=generator)
    return conv, torch.randn(2, 16, 24, generator=generator)


@EACH_DECAY
def test_steps_come_to_what_a_scan_does(is_by_channel: bool) -> None:
    core = make_core(is_by_channel)
    rows = core_rows(core, 150)
    out, state = scan(core, rows, core_state())
    stepped, last = steps(core, rows, core_state())
    assert relative_error(stepped, out) < 3e-6
    assert torch.equal(last[0], state[0])
    assert relative_error(last[1], state[1]) < 3e-6


@EACH_DECAY
def test_a_scan_leaves_the_state_it_starts_from_as_it_was(is_by_channel: bool) -> None:
    core = make_core(is_by_channel)
    state = core_state()
    scan(core, core_rows(core, 70), state)
    assert same_bits(state, core_state())

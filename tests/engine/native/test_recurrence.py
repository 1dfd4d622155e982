"""The walk of linear mixers against the rules written out in float64, and the bits of every cut.

Shapes: T tokens, H heads, h key heads, K key dim, V value dim.
"""

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prfaas.engine.native.recurrence import Inputs, Piece, Rule, walk
from tests.engine.native.margins import guarded, inside

RULES: tuple[Rule, ...] = ("delta", "delta-by-channel", "linear", "linear-constant")
EACH_RULE = pytest.mark.parametrize("rule", RULES)
SIZES = st.sampled_from([1, 5, 8, 16, 24, 31, 33, 40, 64])
TOLERANCE = 2e-6


@dataclass(frozen=True, kw_only=True)
class Size:
    key_heads: int = 2
    heads_per_key: int = 2
    key_dim: int = 24
    value_dim: int = 40

    @property
    def heads(self) -> int:
        return self.key_heads * self.heads_per_key


def make(rule: Rule, size: Size, num_tokens: int, seed: int = 0) -> tuple[Inputs, Tensor]:
    """Return random inputs and a state to begin from."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = size.heads

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    q, k = random(2, num_tokens, size.key_heads, size.key_dim)
    v = random(num_tokens, num_heads, size.value_dim)
    state = random(num_heads, size.key_dim, size.value_dim)
    if rule == "linear-constant":
        inputs = Inputs(q_ThK=q, k_ThK=k, v_THV=v, decay=-positive(num_heads), scale=0.3)
        return inputs, state
    by_channel = (size.key_dim,) if rule == "delta-by-channel" else ()
    inputs = Inputs(
        q_ThK=q,
        k_ThK=k,
        v_THV=v,
        decay=torch.exp(-(positive(num_tokens, num_heads, *by_channel) ** 4)),
        beta_TH=positive(num_tokens, num_heads),
    )
    if rule == "linear":
        return replace(inputs, skip_H=random(num_heads), scale=1.0), state
    return replace(inputs, q_scale_Th=0.2 / q.norm(dim=2), k_scale_Th=1 / k.norm(dim=2)), state


def expected(rule: Rule, inputs: Inputs, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state in float64, head by head."""
    out = torch.empty_like(inputs.v_THV, dtype=torch.float64)
    state = state_HKV.double().clone()
    per_key = inputs.v_THV.shape[1] // inputs.k_ThK.shape[1]
    for h in range(len(state)):
        S = state[h]
        for t in range(len(out)):
            q, k = (x[t, h // per_key].double() for x in (inputs.q_ThK, inputs.k_ThK))
            v = inputs.v_THV[t, h].double()
            if rule == "linear-constant":
                decay, added = 1 + inputs.decay[h].double(), v
            else:
                assert inputs.beta_TH is not None
                decay, added = inputs.decay[t, h].double(), v * inputs.beta_TH[t, h].double()
            S *= decay[:, None] if rule == "delta-by-channel" else decay
            if rule.startswith("delta"):
                assert inputs.q_scale_Th is not None
                assert inputs.k_scale_Th is not None
                assert inputs.beta_TH is not None
                q, k = (
                    q * inputs.q_scale_Th[t, h // per_key],
                    k * inputs.k_scale_Th[t, h // per_key],
                )
                added = inputs.beta_TH[t, h].double() * (v - k @ S)
            S += torch.outer(k, added)
            out[t, h] = q @ S * inputs.scale
            if inputs.skip_H is not None:
                out[t, h] += inputs.skip_H[h].double() * v
    return out, state


def run(
    rule: Rule, inputs: Inputs, state: Tensor, ends: list[int] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs and the states before the rows `ends`, of a walk through all rows."""
    out = torch.full_like(inputs.v_THV, torch.nan)
    kept = [(end, torch.full_like(state, torch.nan)) for end in ends or [len(out)]]
    walk(rule, inputs, [Piece(start=0, stop=len(out), state_HKV=state, ends=kept)], out)
    return out, [tensor for _, tensor in kept]


def cut(inputs: Inputs, start: int, stop: int, *, is_constant: bool) -> Inputs:
    """Return the rows' inputs."""
    by_row: dict[str, Any] = {
        field.name: value[start:stop]
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and field.name != "skip_H"
    }
    if is_constant:
        by_row["decay"] = inputs.decay
    return replace(inputs, **by_row)


def close(actual: Tensor, wanted: Tensor, typical: float = 0.0) -> bool:
    """Return whether they differ little beside the largest value, or one that is typical of sums."""
    largest = wanted.abs().max().clamp(min=typical)
    return bool((actual - wanted).abs().max() < TOLERANCE * largest)


@EACH_RULE
@given(
    key_dim=SIZES,
    value_dim=SIZES,
    key_heads=st.integers(1, 3),
    heads_per_key=st.integers(1, 3),
    num_tokens=st.integers(1, 12),
)
@settings(max_examples=15)
def test_it_is_the_rule(
    rule: Rule, key_dim: int, value_dim: int, key_heads: int, heads_per_key: int, num_tokens: int
) -> None:
    size = Size(
        key_heads=key_heads, heads_per_key=heads_per_key, key_dim=key_dim, value_dim=value_dim
    )
    inputs, state = make(rule, size, num_tokens)
    out, [end] = run(rule, inputs, state)
    wanted, wanted_end = expected(rule, inputs, state)
    assert close(out, wanted, typical=4.0)
    assert close(end, wanted_end, typical=4.0)


@EACH_RULE
def test_two_hundred_tokens_stay_close_to_the_rule(rule: Rule) -> None:
    inputs, state = make(rule, Size(), 200)
    out, [end] = run(rule, inputs, state)
    wanted, wanted_end = expected(rule, inputs, state)
    assert close(out, wanted)
    assert close(end, wanted_end)


@EACH_RULE
@given(at=st.sets(st.integers(1, 39), max_size=6), value_dim=st.sampled_from([8, 40, 64]))
@settings(max_examples=20)
def test_any_cut_keeps_the_bits(rule: Rule, at: set[int], value_dim: int) -> None:
    inputs, state = make(rule, Size(value_dim=value_dim), 40)
    ends = [*sorted(at), 40]
    whole, states = run(rule, inputs, state, ends)
    for (start, stop), wanted in zip(pairwise([0, *ends]), states, strict=True):
        piece = cut(inputs, start, stop, is_constant=rule == "linear-constant")
        out, [state] = run(rule, piece, state)
        assert torch.equal(out, whole[start:stop])
        assert torch.equal(state, wanted)


@EACH_RULE
def test_neighbours_and_rows_of_nobody_change_nothing(rule: Rule) -> None:
    inputs, state = make(rule, Size(), 30)
    other = torch.randn_like(state)
    out = torch.full_like(inputs.v_THV, torch.nan)
    ends = [torch.empty_like(state) for _ in range(2)]
    pieces = [
        Piece(start=4, stop=20, state_HKV=state, ends=[(20, ends[0])]),
        Piece(start=21, stop=22, state_HKV=other, ends=[(22, ends[1])]),
    ]
    walk(rule, inputs, pieces, out)
    for piece, end in zip(pieces, ends, strict=True):
        alone = cut(inputs, piece.start, piece.stop, is_constant=rule == "linear-constant")
        wanted, [wanted_end] = run(rule, alone, piece.state_HKV)
        assert torch.equal(out[piece.start : piece.stop], wanted)
        assert torch.equal(end, wanted_end)
    others = [0, 1, 2, 3, 20, *range(22, 30)]
    assert out[others].isnan().all()


@EACH_RULE
def test_the_number_of_threads_changes_no_bit(rule: Rule) -> None:
    inputs, state = make(rule, Size(key_heads=3, value_dim=70), 50)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(run(rule, inputs, state))
    finally:
        torch.set_num_threads(before)
    for out, [end] in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(end, results[0][1][0])


@EACH_RULE
def test_rows_may_lie_apart(rule: Rule) -> None:
    inputs, state = make(rule, Size(), 20)
    wanted, [wanted_end] = run(rule, inputs, state)

    def apart(tensor: Tensor) -> Tensor:
        room = torch.full((len(tensor), tensor[0].numel() + 5), torch.nan)
        rows = room[:, 2:-3].view(tensor.shape)
        return rows.copy_(tensor)

    wide: dict[str, Any] = {
        field.name: apart(value)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and field.name != "skip_H"
    }
    if rule == "linear-constant":
        wide["decay"] = inputs.decay
    out, [end] = run(rule, replace(inputs, **wide), state)
    assert torch.equal(out, wanted)
    assert torch.equal(end, wanted_end)


@EACH_RULE
@pytest.mark.parametrize("value_dim", [5, 32, 37])
def test_nothing_is_read_or_written_past_an_end(rule: Rule, value_dim: int) -> None:
    inputs, state = make(rule, Size(value_dim=value_dim, key_dim=7), 6)
    wanted, [wanted_end] = run(rule, inputs, state)
    names = [f.name for f in fields(inputs) if isinstance(getattr(inputs, f.name), Tensor)]
    tensors = [getattr(inputs, name) for name in names]
    with guarded(state, *tensors) as (fenced_state, *fenced):
        stands, out = inside(torch.zeros_like(inputs.v_THV))
        end_stands, end = inside(torch.zeros_like(state))
        piece = Piece(start=0, stop=6, state_HKV=fenced_state, ends=[(6, end)])
        held: dict[str, Any] = dict(zip(names, fenced, strict=True))
        walk(rule, replace(inputs, **held), [piece], out)
    assert stands()
    assert end_stands()
    assert torch.equal(out, wanted)
    assert torch.equal(end, wanted_end)


@EACH_RULE
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_in_its_column_or_head(rule: Rule, number: float) -> None:
    inputs, state = make(rule, Size(), 10)
    inputs.v_THV[3, 1, 5] = number
    out, [end] = run(rule, inputs, state)
    assert not end[1, :, 5].isfinite().any()
    end[1, :, 5] = 0.0
    out[:, 1, 5] = 0.0
    assert end.isfinite().all()
    assert out.isfinite().all()


@EACH_RULE
def test_no_pieces_are_no_work(rule: Rule) -> None:
    inputs, _ = make(rule, Size(), 0)
    walk(rule, inputs, [], inputs.v_THV)


@EACH_RULE
def test_a_state_of_another_shape_is_refused(rule: Rule) -> None:
    inputs, state = make(rule, Size(), 3)
    with pytest.raises(AssertionError):
        run(rule, inputs, state.transpose(1, 2))
    with pytest.raises(AssertionError):
        run(rule, inputs, state.double())

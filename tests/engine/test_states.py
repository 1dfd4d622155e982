"""The states of a layer: found by exact position, never written, exported byte by byte."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.mixer_spec import (
    GdnSpec,
    KdaSpec,
    LightningSpec,
    Mamba2Spec,
    MixerSpec,
    ShortConvSpec,
    state_bytes,
)
from prfaas.engine.states import LayerState, State
from tests.engine.places import DEVICES

SPEC = KdaSpec(num_heads=2, head_dim=4, conv_width=4)
SPECS: list[MixerSpec] = [
    SPEC,
    GdnSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, conv_width=3),
    LightningSpec(num_heads=2, head_dim=5, scale=1.0, slope_scale=1.0),
    Mamba2Spec(num_heads=2, head_dim=3, state_dim=5, num_groups=1, conv_width=4),
    ShortConvSpec(channels=7, conv_width=3),
]


def random_state(states: LayerState, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in states.shapes)


def exported(states: LayerState, position: int) -> bytearray:
    out = bytearray(states.nbytes)
    states.write_to(position, memoryview(out), 0)
    return out


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.mixer)
def test_at_position_0_a_state_is_zeros_in_the_shapes_of_the_spec(spec: MixerSpec) -> None:
    states = LayerState(spec)
    state = states.at(0)
    assert [tensor.shape for tensor in state] == [tensor.shape for tensor in spec.states]
    assert not any(tensor.any() for tensor in state)
    assert states.nbytes == 4 * sum(tensor.numel() for tensor in state)


def test_a_state_serves_its_position_alone() -> None:
    states = LayerState(SPEC)
    states.hold(64, random_state(states))
    assert states.holds(64)
    assert not states.holds(65)
    with pytest.raises(ValueError, match=r"no state at 65 tokens; there is one at \(64,\)"):
        states.at(65)


def test_a_forward_forgets_every_position_but_the_one_it_starts_from() -> None:
    states = LayerState(SPEC)
    for position in (64, 128, 192):
        states.hold(position, random_state(states, position))
    states.begin(128, [256, 192])
    assert states.positions == (128,)
    assert states.wanted == (192, 256)
    states.begin(128, ())
    assert not states.wanted


def test_a_forward_may_keep_one_state_more() -> None:
    states = LayerState(SPEC)
    for position in (64, 128, 150):
        states.hold(position, random_state(states, position))
    kept = states.at(128)
    states.begin(150, [], kept=128)
    assert states.positions == (128, 150)
    assert states.at(128) is kept
    states.begin(150, [], kept=64)
    assert not states.holds(128)


def test_a_forward_that_cannot_start_forgets_nothing() -> None:
    states = LayerState(SPEC)
    states.hold(64, random_state(states))
    with pytest.raises(ValueError, match="no state at 65"):
        states.begin(65, [])
    assert states.positions == (64,)


def test_a_forward_from_0_can_start_after_any_other() -> None:
    states = LayerState(SPEC)
    states.hold(64, random_state(states))
    states.begin(64, [])
    states.begin(0, [])
    assert not states.positions
    assert not states.at(0)[0].any()


def test_a_fork_goes_its_own_way() -> None:
    states = LayerState(SPEC)
    states.hold(64, random_state(states))
    other = states.fork()
    other.hold(65, random_state(states, 1))
    states.begin(0, [])
    assert other.positions == (64, 65)
    assert other.shapes == states.shapes
    assert not states.positions


def test_a_fork_exports_the_bytes_of_its_origin() -> None:
    states = LayerState(SPEC, kv_dtype=torch.bfloat16)
    states.hold(64, random_state(states))
    assert exported(states.fork(), 64) == exported(states, 64)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.mixer)
@given(data=st.data())
@settings(max_examples=30)
def test_export_and_import_in_slices_of_any_order_are_the_identity(
    spec: MixerSpec, data: st.DataObject
) -> None:
    source = LayerState(spec)
    source.hold(70, random_state(source))
    cuts = data.draw(st.sets(st.integers(1, source.nbytes - 1), max_size=6))
    edges = [0, *sorted(cuts), source.nbytes]
    slices = list(pairwise(edges))
    order = data.draw(st.permutations(slices))
    repeated = data.draw(st.lists(st.sampled_from(slices), max_size=3))
    target = LayerState(spec)
    for start, stop in [*repeated, *order]:
        page = bytearray(stop - start)
        source.write_to(70, memoryview(page), start)
        target.read_from(70, memoryview(page), start)
    assert all(map(torch.equal, target.at(70), source.at(70)))
    assert exported(target, 70) == exported(source, 70)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.mixer)
@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
@settings(max_examples=10)
def test_convolution_rows_travel_in_the_dtype_of_keys_and_the_recurrence_in_float32(
    device: str, spec: MixerSpec, data: st.DataObject
) -> None:
    place = torch.device(device)
    source, target = (LayerState(spec, kv_dtype=torch.bfloat16, device=place) for _ in range(2))
    assert source.nbytes == state_bytes(spec, "bfloat16")
    state = random_state(source)
    source.hold(70, tuple(tensor.to(place) for tensor in state))
    cuts = data.draw(st.sets(st.integers(1, source.nbytes - 1), max_size=6))
    for start, stop in data.draw(
        st.permutations(list(pairwise([0, *sorted(cuts), source.nbytes])))
    ):
        page = bytearray(stop - start)
        source.write_to(70, memoryview(page), start)
        target.read_from(70, memoryview(page), start)
    assert exported(target, 70) == exported(source, 70)
    for kept, tensor, ours in zip(spec.states, state, target.at(70), strict=True):
        expected = tensor if kept.name == "recurrent" else tensor.bfloat16().float()
        assert (ours.device.type, ours.dtype) == (device, torch.float32)
        assert torch.equal(ours.cpu(), expected)


def test_a_state_counts_once_every_byte_has_come() -> None:
    states, other = LayerState(SPEC), LayerState(SPEC)
    other.hold(64, random_state(other))
    data = memoryview(exported(other, 64))
    states.read_from(64, data[:100], 0)
    states.read_from(64, data[101:], 101)
    states.read_from(64, data[:100], 0)
    assert not states.holds(64)
    states.read_from(64, data[100:101], 100)
    assert states.holds(64)


def test_what_came_in_part_is_forgotten_when_a_forward_starts() -> None:
    states = LayerState(SPEC)
    data = memoryview(bytearray(states.nbytes))
    states.read_from(64, data[:-4], 0)
    states.begin(0, [])
    states.read_from(64, data[-4:], states.nbytes - 4)
    assert not states.holds(64)


def test_nan_and_negative_zero_keep_their_bytes() -> None:
    source, target = LayerState(SPEC), LayerState(SPEC)
    state = random_state(source)
    state[1].view(-1)[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    source.hold(64, state)
    target.read_from(64, memoryview(exported(source, 64)), 0)
    assert exported(target, 64) == exported(source, 64)


def test_a_slice_past_the_end_is_refused() -> None:
    states = LayerState(SPEC)
    page = memoryview(bytearray(8))
    with pytest.raises(ValueError, match=f"of a state of {states.nbytes} bytes"):
        states.write_to(0, page, states.nbytes - 4)
    with pytest.raises(ValueError, match="bytes -4 to 4"):
        states.read_from(64, page, -4)


def test_what_is_imported_does_not_alias_the_pages() -> None:
    states = LayerState(SPEC)
    data = bytearray(states.nbytes)
    states.read_from(64, memoryview(data), 0)
    data[:4] = b"\x01\x02\x03\x04"
    assert not states.at(64)[0].any()

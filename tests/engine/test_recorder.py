"""The memory of a recording: used again once nothing sees it, and no sooner."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.recorder import LINE_BYTES, Memory, NotRecordableError

ROOT = Path(__file__).parents[2]


def test_a_tensor_that_is_gone_leaves_its_room() -> None:
    memory = Memory([], 1 << 20)
    first = memory.empty((3, 5), (5, 1), torch.float32)
    place = first.data_ptr()
    del first
    assert memory.empty((15,), (1,), torch.float32).data_ptr() == place
    assert memory.nbytes == LINE_BYTES


def test_a_view_keeps_the_room_of_its_tensor() -> None:
    memory = Memory([], 1 << 20)
    first = memory.empty((4, 4), (4, 1), torch.float32)
    place, view = first.data_ptr(), first.T[1:]
    del first
    other = memory.empty((4, 4), (4, 1), torch.float32)
    assert other.data_ptr() != place
    del view
    assert memory.empty((4, 4), (4, 1), torch.float32).data_ptr() == place


def test_nothing_is_used_again_once_the_recording_is_made() -> None:
    memory = Memory([], 1 << 20)
    first = memory.empty((4,), (1,), torch.float32)
    place = first.data_ptr()
    memory.end()
    del first
    assert memory.empty((4,), (1,), torch.float32).data_ptr() != place


def test_there_is_no_more_room_than_was_given() -> None:
    memory = Memory([], 2 * LINE_BYTES)
    held = memory.empty((16,), (1,), torch.float32)
    with pytest.raises(NotRecordableError, match="128 bytes"):
        memory.empty((17,), (1,), torch.float32)
    assert memory.nbytes == held.nbytes == LINE_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.bool])
def test_a_tensor_has_the_strides_that_were_asked_for(dtype: torch.dtype) -> None:
    tensor = Memory([], 1 << 20).empty((2, 3), (1, 2), dtype)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (1, 2), dtype)
    assert tensor.data_ptr() % LINE_BYTES == 0


@given(
    starts=st.lists(st.integers(0, 100), unique=True, max_size=6),
    start=st.integers(0, 110),
    size=st.integers(1, 12),
)
@settings(deadline=None)
def test_bytes_are_held_if_one_region_has_them_all(
    starts: list[int], start: int, size: int
) -> None:
    regions = [(10 * low, 10 * low + 10) for low in sorted(starts)]
    memory = Memory(regions, 0)
    expected = any(low <= start and start + size <= high for low, high in regions)
    assert memory.has(start, size) == expected
    assert not memory.owns(start, size)


@pytest.mark.slow
def test_recording_does_not_load_torchs_compiler() -> None:
    """Which takes longer than to load a model."""
    code = """
import sys
import torch
from prfaas.engine.recorder import Memory, Recorder
recorder = Recorder(Memory([], 1 << 20))
x = recorder.memory.empty((4,), (1,), torch.float32)
with recorder.recording():
    x.mul_(torch.empty(4))
assert len(recorder.steps) == 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

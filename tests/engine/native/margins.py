"""Memory whose ends show who reads or writes past them."""

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

PAGE_BYTES = mmap.PAGESIZE
PROT_NONE = 0
MARGIN = 64
MARK = 12345.5


@contextlib.contextmanager
def guarded(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Return copies of contiguous tensors, each of which ends where a page that kills begins."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_guarded(tensor)) for tensor in tensors]


@contextlib.contextmanager
def _guarded(tensor: Tensor) -> Iterator[Tensor]:
    num_bytes = -(-tensor.nbytes // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES)
    held = torch.frombuffer(memory, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    fence = held.data_ptr() + num_bytes
    assert protect(fence, PAGE_BYTES, PROT_NONE) == 0, ctypes.get_errno()
    try:
        room = held[num_bytes - tensor.nbytes : num_bytes]
        copy = room.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        yield copy
    finally:
        protect(fence, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)


def inside(tensor: Tensor) -> tuple[Callable[[], bool], Tensor]:
    """Return a float32 copy with MARGIN marked numbers before and after, and whether they stand."""
    room = torch.full((tensor.numel() + 2 * MARGIN,), MARK)
    copy = room[MARGIN:-MARGIN].view(tensor.shape)
    copy.copy_(tensor)

    def stand() -> bool:
        return bool((room[:MARGIN] == MARK).all() and (room[-MARGIN:] == MARK).all())

    return stand, copy

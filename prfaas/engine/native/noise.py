"""Which token ids get much noise: `splitmix`'s hash over a whole vocabulary.

Shapes: V vocabulary entries.
"""

import numpy as np
from numpy.typing import NDArray

from prfaas.engine.native.code import I64
from prfaas.engine.native.kernel import Kernel, Task
from prfaas.engine.splitmix import GOLDEN, MIX_1, MIX_2

LANES = 4
UNIT_IDS = 1 << 14


def loud_ids(key: int, threshold: int, num_ids: int) -> NDArray[np.int64]:
    """Return the ascending ids below `num_ids`, at least LANES, whose hash is `threshold` or more.

    Of id i that is SplitMix64's output function of key + (i + 1) * GOLDEN.
    """
    assert num_ids >= LANES
    is_loud = np.empty(num_ids, np.bool_)
    _is_loud(is_loud.ctypes.data, num_ids, _signed(key), _signed(threshold))
    return np.flatnonzero(is_loud)


def _signed(word: int) -> int:
    """Return the int64 of a 64-bit word's bits."""
    return word - (1 << 64) if word >> 63 else word


def _body(task: Task) -> None:
    code, num_ids = task.code, task.number("num_ids")
    sign = code.splat(code.whole(-1 << 63), LANES)
    key = code.splat(task.number("key"), LANES)
    floor = code.splat(task.number("threshold"), LANES) ^ sign  # words compare as unsigned
    numbers = code.ints(range(1, LANES + 1), I64)
    with task.units((num_ids + (UNIT_IDS - 1)) // UNIT_IDS) as unit:
        first = unit * UNIT_IDS
        with code.loop(first, code.smaller(first + UNIT_IDS, num_ids), LANES) as start:
            # The last few of a vocabulary are looked at twice.
            index = code.select(start + LANES <= num_ids, start, num_ids - LANES)
            word = (code.splat(index, LANES) + numbers) * _signed(GOLDEN) + key
            word = (word ^ (word >> 30)) * _signed(MIX_1)
            word = (word ^ (word >> 27)) * _signed(MIX_2)
            word = word ^ (word >> 31)
            is_loud = (word ^ sign) >= floor
            (task.pointer("is_loud") + index).store(code.to_int8(is_loud))


_is_loud = Kernel(
    "is_loud",
    {"is_loud": "int8*", "num_ids": "int", "key": "int", "threshold": "int"},
    _body,
)

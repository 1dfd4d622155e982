"""A unit of attention's work: which rows and keys, and where a thread's scratch is.

Shapes: a row is one query head of one token, numbered token * G + group within its KV head; G query
heads of a KV head, K key dim, V value dim. Scratch holds rows in groups of ROWS, and both dims
rounded up to LANES.
"""

from prfaas.engine.native.code import F32, Pointer, Value
from prfaas.engine.native.kernel import Argument, Task

KEY_BLOCK = 128
LANES = 8
ROWS = 4
"""Rows that are computed together, from one reading of keys and values."""
SCORES = (KEY_BLOCK + 8) * ROWS
"""Scratch of a group's scores, [key, row]; a power of two would put groups on the same cache lines."""
LOWEST = -3.4028234663852886e38
"""The largest score of a row that sees nothing: finite, so that no difference is a NaN."""
MAX_POSITIONS = 1 << 24
"""Positions are compared as float32."""

ARGUMENTS: dict[str, Argument] = {
    "q": "float32*",
    "q_token": "int",
    "q_head": "int",
    "q_group": "int",
    "out": "float32*",
    "out_token": "int",
    "out_head": "int",
    "out_group": "int",
    "sinks": "float32*",
    "has_sinks": "int",
    "places": "int64*",
    "sequences": "int64*",
    "num_sequences": "int",
    "num_units": "int",
    "counters": "int64*",
    "scratch": "float32*",
    "slots": "float32*",
    "key_dim": "int",
    "value_dim": "int",
    "key_stride": "int",
    "value_stride": "int",
    "num_groups": "int",
    "window": "int",
    "tile_rows": "int",
    "scale": "float",
}
"""Strides are in elements. `scratch` and the first `slots` are the threads', one each."""
PLACE = ("keys", "values", "key_head", "value_head")
"""A sequence's int64s in `places`: addresses of the keys and values of position 0, and strides between
heads."""
SEQUENCE = (
    "position",
    "num_rows",
    "first_token",
    "first_unit",
    "num_splits",
    "first_slot",
    "first_counter",
)
"""And in `sequences`: position of the first query, query rows of a KV head, the first query's place in
the batch; number of its first unit; how many units a tile's blocks are, or 0; and where it has a slot
for each such unit and a counter, 0 at first, for each tile."""


def slot_floats(tile_rows: int, value_dim: int) -> int:
    """Return the size of a slot: each row's largest score, sum of weights, and result."""
    return tile_rows * (2 + _ceil(value_dim, LANES))


def scratch_floats(tile_rows: int, key_dim: int, value_dim: int) -> int:
    """Return the size of a thread's scratch."""
    per_row = 2 + _ceil(key_dim, LANES) + SCORES // ROWS
    return slot_floats(tile_rows, value_dim) + tile_rows * per_row


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Unit:
    """A unit of work, and where a thread's scratch is.

    Attributes:
        head: the KV head.
        row, rows: the tile's first row, and how many there are.
        groups: how often ROWS they are.
        low, high: some row sees positions low, ..., high - 1.
        first_block, end_block: to be computed.
        is_split, is_whole: whether the unit is a block of a tile or the tile.
    """

    def __init__(self, task: Task, number: Value) -> None:
        self.code = code = task.code
        sequences = task.pointer("sequences")
        found = code.variable(code.whole(0))
        first_unit = SEQUENCE.index("first_unit")
        with code.loop(1, task.number("num_sequences")) as sequence:
            first = (sequences + (sequence * len(SEQUENCE) + first_unit)).load()
            with code.when(first <= number):
                found.set(sequence)
        own = sequences + found.value * len(SEQUENCE)
        field = {name: (own + index).load() for index, name in enumerate(SEQUENCE)}
        self.num_splits = field["num_splits"]
        self.is_split, self.is_whole = self.num_splits > 0, self.num_splits <= 0
        splits = code.select(self.is_split, self.num_splits, 1)
        num_groups, tile_rows = task.number("num_groups"), task.number("tile_rows")
        tiles = (field["num_rows"] + (tile_rows - 1)) // tile_rows
        index = number - field["first_unit"]
        tile, split = index // splits, index % splits
        self.counter = field["first_counter"] + tile
        self.head = tile // tiles
        # Late tiles see most and come first, so that threads end together.
        self.row = (tiles - 1 - tile % tiles) * tile_rows
        self.rows = code.smaller(field["num_rows"] - self.row, tile_rows)
        self.groups = (self.rows + (ROWS - 1)) // ROWS
        self.position, self.first_token = field["position"], field["first_token"]
        before = self.position - task.number("window") + 1
        self.low = code.larger(before + self.row // num_groups, 0)
        self.high = self.position + (self.row + self.rows - 1) // num_groups + 1
        block = code.larger(before, 0) // KEY_BLOCK
        self._first_slot = field["first_slot"] + tile * splits - block
        self._worker = task.worker
        end = (self.high - 1) // KEY_BLOCK + 1
        self.first_block = code.select(self.is_split, block + split, self.low // KEY_BLOCK)
        self.end_block = code.select(self.is_split, block + split + 1, end)
        self._place_scratch(task)
        place = task.pointer("places") + found.value * len(PLACE)
        self.keys = place.load_pointer(F32) + self.head * (place + 2).load()
        self.values = (place + 1).load_pointer(F32) + self.head * (place + 3).load()
        self.key_stride, self.value_stride = task.number("key_stride"), task.number("value_stride")
        self.scale = code.splat(task.number("scale"), LANES)

    def _place_scratch(self, task: Task) -> None:
        key_dim, value_dim = task.number("key_dim"), task.number("value_dim")
        rows = task.number("tile_rows")
        self.key_floats, self.value_vectors = _vectors(key_dim) * LANES, _vectors(value_dim)
        self.whole_keys, self.key_tail = key_dim // LANES * LANES, key_dim % LANES
        self.whole_vectors, self.value_tail = value_dim // LANES, value_dim % LANES
        self._slots, self._tile_rows = task.pointer("slots"), rows
        self._slot_floats = rows * (self.value_vectors * LANES + 2)
        size = self._slot_floats + rows * (self.key_floats + (2 + SCORES // ROWS))
        self.state = Slot(task.pointer("scratch") + self._worker * size, rows)
        self.first = self.state.largest + self._slot_floats
        self.last = self.first + rows
        self.q = self.last + rows
        self.scores = self.q + rows * self.key_floats

    def slot(self, block: Value) -> "Slot":
        """Return where a block's result goes."""
        number = self.code.select(self.is_split, self._first_slot + block, self._worker)
        return Slot(self._slots + number * self._slot_floats, self._tile_rows)


class Slot:
    """Each row's largest score, sum of weights, and sum of weighted values, [group, vector, row, lane]."""

    def __init__(self, place: Pointer, rows: Value) -> None:
        self.largest = place
        self.sums = place + rows
        self.results = place + rows * 2


def _vectors(dim: Value) -> Value:
    return (dim + (LANES - 1)) // LANES

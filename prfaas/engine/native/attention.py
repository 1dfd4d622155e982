"""Softmax attention in one pass over the keys, for prefill chunks and decode steps alike.

The bits of a query's result follow from the query and from the keys and values that it sees:

- a score is a sum in LANES lanes along the head dim, lanes added by one tree, times the scale;
- keys lie on an absolute grid of KEY_BLOCK positions. In a block, weights are exp(score - m), m the
  largest score seen there. Their sum is taken in LANES lanes by position, and with the values they
  make one chain of fused multiply-adds in ascending position;
- blocks are joined in ascending order: what was so far is multiplied by exp(m - largest), the block
  by exp(its m - largest), and both are added. A block of which nothing is seen changes nothing.

A unit of work is a tile of query rows of one KV head over all blocks that it sees. Where there are
few tiles, as for decode steps, a unit is one block of a tile, and the thread that completes a tile
joins its blocks in order, to the same bits.

Shapes: a row is one query head of one token, numbered token * G + group within its KV head; G query
heads of a KV head, K key dim, V value dim. Scratch holds rows in groups of ROWS, and both dims
rounded up to LANES.
"""

from functools import cache

from prfaas.engine.native.code import F32, Code, Pointer, Value, Variable
from prfaas.engine.native.exp import exp
from prfaas.engine.native.kernel import Argument, Kernel, Task

KEY_BLOCK = 128
LANES = 8
ROWS = 4
"""Rows that are computed together, from one reading of keys and values."""
KEYS = 3
"""Keys of a tile of scores: its 12 sums and what is multiplied fill 16 registers."""
VECTORS = 3
"""Vectors of values in a tile of results, for the same reason."""
AHEAD_KEYS = 12
"""How far ahead of the sums keys are fetched: without it memory gives two thirds of its rate."""
NEAR_KEYS = 16
"""Keys whose values stay in the nearest cache while all rows of a tile take them, and the next come."""
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


@cache
def attention_kernel() -> Kernel:
    """Return the kernel, which takes ARGUMENTS and trusts them."""
    return Kernel("attention", ARGUMENTS, _write)


def _write(task: Task) -> None:
    code = task.code
    with task.units(task.number("num_units")) as number:
        unit = _Unit(task, number)
        _take_queries(task, unit)
        _clear(code, unit)
        with code.loop(unit.first_block, unit.end_block) as block:
            start = block * KEY_BLOCK
            low = _larger(code, unit.low, start)
            high = code.smaller(unit.high, start + KEY_BLOCK)
            slot = unit.slot(block)
            with code.when(low < high):
                _score(code, unit, low, high, start)
                _weigh(code, unit, low, high, start, slot)
                _mix(code, unit, low, high, start, slot)
            with code.otherwise(unit.is_split):
                _join(code, unit, slot)
        is_last = code.variable(unit.is_split)
        with code.when(unit.is_split):
            before = (task.pointer("counters") + unit.counter).fetch_add(1)
            is_last.set(before.equals(unit.num_splits - 1))
        with code.when(is_last.value):
            first = unit.low // KEY_BLOCK
            with code.loop(first, (unit.high - 1) // KEY_BLOCK + 1) as block:
                _join(code, unit, unit.slot(block))
        with code.when(is_last.value | unit.is_whole):
            _finish(task, unit)


class _Unit:
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
        zero, before = code.whole(0), self.position - task.number("window") + 1
        self.low = _larger(code, before + self.row // num_groups, zero)
        self.high = self.position + (self.row + self.rows - 1) // num_groups + 1
        block = _larger(code, before, zero) // KEY_BLOCK
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
        self.state = _Slot(task.pointer("scratch") + self._worker * size, rows)
        self.first = self.state.largest + self._slot_floats
        self.last = self.first + rows
        self.q = self.last + rows
        self.scores = self.q + rows * self.key_floats

    def slot(self, block: Value) -> "_Slot":
        """Return where a block's result goes."""
        number = self.code.select(self.is_split, self._first_slot + block, self._worker)
        return _Slot(self._slots + number * self._slot_floats, self._tile_rows)


class _Slot:
    """Each row's largest score, sum of weights, and sum of weighted values, [group, vector, row, lane]."""

    def __init__(self, place: Pointer, rows: Value) -> None:
        self.largest = place
        self.sums = place + rows
        self.results = place + rows * 2


def _vectors(dim: Value) -> Value:
    return (dim + (LANES - 1)) // LANES


def _larger(code: Code, a: Value, b: Value) -> Value:
    return code.select(a < b, b, a)


def _take_queries(task: Task, unit: _Unit) -> None:
    """Copy the tile's queries, filled up with zeros, and note what each row sees.

    Rows up to a multiple of ROWS repeat the last one and see nothing.
    """
    code, num_groups = task.code, task.number("num_groups")
    q = task.pointer("q") + unit.head * task.number("q_head")
    with code.loop(0, unit.groups * ROWS) as index:
        is_row = index < unit.rows
        row = unit.row + code.select(is_row, index, unit.rows - 1)
        token, group = row // num_groups, row % num_groups
        position = unit.position + token
        first = _larger(code, position - task.number("window") + 1, code.whole(0))
        (unit.first + index).store(code.to_float(first))
        (unit.last + index).store(code.to_float(code.select(is_row, position, -1)))
        source = q + (unit.first_token + token) * task.number("q_token")
        source += group * task.number("q_group")
        target = unit.q + index * unit.key_floats
        with code.loop(0, unit.whole_keys, LANES) as start:
            (target + start).store((source + start).load(LANES))
        with code.when(unit.key_tail > 0):
            tail = (source + unit.whole_keys).load_some(unit.key_tail, LANES)
            (target + unit.whole_keys).store(tail)


def _clear(code: Code, unit: _Unit) -> None:
    """Have seen nothing."""
    with code.loop(0, unit.groups * ROWS, ROWS) as row:
        (unit.state.largest + row).store(code.real(LOWEST, ROWS))
        (unit.state.sums + row).store(code.real(0.0, ROWS))
    with code.loop(0, unit.groups * unit.value_vectors * (ROWS * LANES), LANES) as index:
        (unit.state.results + index).store(code.real(0.0, LANES))


def _score(code: Code, unit: _Unit, low: Value, high: Value, start: Value) -> None:
    """Write q.k of all rows and keys low, ..., high - 1 to the scores; and of a few keys again."""
    zero = code.real(0.0, LANES)
    with code.loop(low, high, KEYS) as key:
        keys = [unit.keys + code.smaller(key + i, high - 1) * unit.key_stride for i in range(KEYS)]
        with code.loop(0, unit.groups) as group:
            first = unit.q + group * ROWS * unit.key_floats
            rows = [first + unit.key_floats * row for row in range(ROWS)]
            sums = [[code.variable(zero) for _ in rows] for _ in keys]
            with code.loop(0, unit.whole_keys, LANES) as dim:
                soon = keys[0] + (unit.key_stride * AHEAD_KEYS + dim * KEYS)
                soon.prefetch()
                (soon + LANES * KEYS // 2).prefetch()
                k = [(key_ + dim).load(LANES) for key_ in keys]
                _multiply(code, k, [row + dim for row in rows], sums)
            with code.when(unit.key_tail > 0):
                whole, tail = unit.whole_keys, unit.key_tail
                last = [(k + whole).load_some(tail, LANES) for k in keys]
                _multiply(code, last, [row + whole for row in rows], sums)
            scores = unit.scores + (group * SCORES + (key - start) * ROWS)
            for i, sums_of_key in enumerate(sums):
                dots = _lane_sums(code, *(total.value for total in sums_of_key))
                (scores + i * ROWS).store(dots)


def _multiply(
    code: Code, keys: list[Value], rows: list[Pointer], sums: list[list[Variable]]
) -> None:
    """Add the products of a chunk of the head dim to the sums of each key and row."""
    for i, row in enumerate(rows):
        q = row.load(LANES)  # a register at a time: there are 16
        for k, sums_of_key in zip(keys, sums, strict=True):
            sums_of_key[i].set(code.fma(q, k, sums_of_key[i].value))


def _lane_sums(code: Code, a: Value, b: Value, c: Value, d: Value) -> Value:
    """Return each vector's sum, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of its lanes."""
    total = _pair_sums(code, _pair_sums(code, a, b), _pair_sums(code, c, d))
    return _low_half(code, total) + _high_half(code, total)


def _pair_sums(code: Code, a: Value, b: Value) -> Value:
    """Return the sums of neighbours: in each half, those of a and then those of b."""
    even = code.shuffle(a, b, (0, 2, 8, 10, 4, 6, 12, 14))
    return even + code.shuffle(a, b, (1, 3, 9, 11, 5, 7, 13, 15))


def _low_half(code: Code, vector: Value) -> Value:
    return code.shuffle(vector, vector, (0, 1, 2, 3))


def _high_half(code: Code, vector: Value) -> Value:
    return code.shuffle(vector, vector, (4, 5, 6, 7))


def _twice(code: Code, pointer: Pointer) -> Value:
    """Return a group's four numbers in both halves."""
    four = pointer.load(ROWS)
    return code.shuffle(four, four, (0, 1, 2, 3) * 2)


def _weigh(code: Code, unit: _Unit, low: Value, high: Value, start: Value, slot: _Slot) -> None:
    """Turn scores into weights, 0 for what a row does not see; write largest scores and sums."""
    keys = [code.to_float(code.ints([i] * ROWS + [i + 1] * ROWS)) for i in range(0, LANES, 2)]
    begin, end = (low - start) // LANES * LANES, high - start
    with code.loop(0, unit.groups) as group:
        row = group * ROWS
        first, last = _twice(code, unit.first + row), _twice(code, unit.last + row)
        scores = unit.scores + group * SCORES
        largest = code.variable(code.real(LOWEST, LANES))
        with code.loop(begin, end, LANES) as key:
            base = code.splat(code.to_float(start + key), LANES)
            for i, number in enumerate(keys):
                place = scores + (key * ROWS + i * LANES)
                position = base + number
                is_seen = (position >= first) & (position <= last)
                score = code.select(is_seen, place.load(LANES) * unit.scale, float("-inf"))
                place.store(score)
                largest.set(code.select(score > largest.value, score, largest.value))
        halves = _low_half(code, largest.value), _high_half(code, largest.value)
        (slot.largest + row).store(code.maximum(*halves))
        most = _twice(code, slot.largest + row)
        sums = [code.variable(code.real(0.0, LANES)) for _ in keys]
        with code.loop(begin, end, LANES) as key:
            for i, total in enumerate(sums):
                place = scores + (key * ROWS + i * LANES)
                weight = exp(code, place.load(LANES) - most)
                place.store(weight)
                total.set(total.value + weight)
        a, b, c, d = (total.value for total in sums)
        total8 = (a + b) + (c + d)
        (slot.sums + row).store(_low_half(code, total8) + _high_half(code, total8))


def _mix(code: Code, unit: _Unit, low: Value, high: Value, start: Value, slot: _Slot) -> None:
    """Write the sums of weighted values of keys low, ..., high - 1."""
    scores = unit.scores + (-start) * ROWS
    with code.loop(0, unit.groups * unit.value_vectors * (ROWS * LANES), LANES) as index:
        (slot.results + index).store(code.real(0.0, LANES))
    with code.loop(low, high, NEAR_KEYS) as near:
        end = code.smaller(near + NEAR_KEYS, high)
        together = unit.whole_vectors // VECTORS * VECTORS
        with code.loop(0, together, VECTORS) as vector:
            _mix_vectors(code, unit, scores, slot, (near, end), vector, VECTORS)
        with code.loop(together, unit.whole_vectors) as vector:
            _mix_vectors(code, unit, scores, slot, (near, end), vector, 1)
        with code.when(unit.value_tail > 0):
            _mix_vectors(code, unit, scores, slot, (near, end), unit.whole_vectors, 0)


def _mix_vectors(
    code: Code,
    unit: _Unit,
    scores: Pointer,
    slot: _Slot,
    keys: tuple[Value, Value],
    vector: Value,
    count: int,
) -> None:
    """Add the weighted values of some keys in `count` vectors of lanes; 0: in the last, not full one."""
    values = unit.values + vector * LANES
    with code.loop(*keys) as key:
        soon = values + (key + NEAR_KEYS) * unit.value_stride
        soon.prefetch()
        (soon + (VECTORS - 1) * LANES).prefetch()
    with code.loop(0, unit.groups) as group:
        results = slot.results + (group * unit.value_vectors + vector) * (ROWS * LANES)
        places = [results + i * LANES for i in range(max(count, 1) * ROWS)]
        sums = [code.variable(place.load(LANES)) for place in places]
        with code.loop(*keys) as key:
            value = values + key * unit.value_stride
            vectors = [(value + i * LANES).load(LANES) for i in range(count)] or [
                value.load_some(unit.value_tail, LANES)
            ]
            weights = scores + (group * SCORES + key * ROWS)
            for row in range(ROWS):
                weight = code.splat((weights + row).load(), LANES)
                for i, v in enumerate(vectors):
                    total = sums[i * ROWS + row]
                    total.set(code.fma(weight, v, total.value))
        for place, total in zip(places, sums, strict=True):
            place.store(total.value)


def _join(code: Code, unit: _Unit, slot: _Slot) -> None:
    """Add a block to what was seen so far."""
    state = unit.state
    with code.loop(0, unit.groups) as group:
        row = group * ROWS
        old, new = (state.largest + row).load(ROWS), (slot.largest + row).load(ROWS)
        largest = code.select(new > old, new, old)
        (state.largest + row).store(largest)
        keep, take = exp(code, old - largest), exp(code, new - largest)
        sums = state.sums + row
        sums.store(code.fma((slot.sums + row).load(ROWS), take, sums.load(ROWS) * keep))
        kept = [code.splat(code.lane(keep, i), LANES) for i in range(ROWS)]
        taken = [code.splat(code.lane(take, i), LANES) for i in range(ROWS)]
        with code.loop(0, unit.value_vectors) as vector:
            first = (group * unit.value_vectors + vector) * (ROWS * LANES)
            for i in range(ROWS):
                result = state.results + (first + i * LANES)
                block = (slot.results + (first + i * LANES)).load(LANES)
                result.store(code.fma(block, taken[i], result.load(LANES) * kept[i]))


def _finish(task: Task, unit: _Unit) -> None:
    """Divide by the sums of weights, a sink's among them, and write the rows."""
    code, num_groups = task.code, task.number("num_groups")
    out = task.pointer("out") + unit.head * task.number("out_head")
    with code.loop(0, unit.rows) as index:
        row = unit.row + index
        token, group = row // num_groups, row % num_groups
        largest = (unit.state.largest + index).load()
        total = code.variable((unit.state.sums + index).load())
        share = code.variable(code.real(1.0))
        with code.when(task.number("has_sinks") > 0):
            sink = (task.pointer("sinks") + (unit.head * num_groups + group)).load()
            most = code.select(sink > largest, sink, largest)
            share.set(exp(code, largest - most))
            total.set(code.fma(total.value, share.value, exp(code, sink - most)))
        target = out + (unit.first_token + token) * task.number("out_token")
        target += group * task.number("out_group")
        first = (index // ROWS * unit.value_vectors * ROWS + index % ROWS) * LANES
        kept, divisor = (code.splat(v.value, LANES) for v in (share, total))

        def result(vector: Value, first: Value = first) -> Value:
            # Nothing seen may have made -0 of the smallest numbers' sum, or left it: +0 for both.
            weighted = (unit.state.results + (first + vector * (ROWS * LANES))).load(LANES)
            return (weighted * kept + 0.0) / divisor

        with code.loop(0, unit.whole_vectors) as vector:
            (target + vector * LANES).store(result(vector))
        with code.when(unit.value_tail > 0):
            tail = target + unit.whole_vectors * LANES
            tail.store_some(result(unit.whole_vectors), unit.value_tail)

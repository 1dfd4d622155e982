"""Attention in one block of keys: scores, weights, weighted values, and joining it to others.

Results of a group lie [vector, row, lane], scores and weights [key, row].
"""

from prfaas.engine.native.attention_unit import LANES, LOWEST, ROWS, SCORES, Slot, Unit
from prfaas.engine.native.code import Code, Pointer, Value, Variable
from prfaas.engine.native.exp import exp

KEYS = 3
"""Keys of a tile of scores: its 12 sums and what is multiplied fill 16 registers."""
VECTORS = 3
"""Vectors of values in a tile of results, for the same reason."""
AHEAD_KEYS = 12
"""How far ahead of the sums keys are fetched: without it memory gives two thirds of its rate."""
NEAR_KEYS = 16
"""Keys whose values stay in the nearest cache while all rows of a tile take them, and the next come."""


def score(code: Code, unit: Unit, low: Value, high: Value, start: Value) -> None:
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
                chunks = [(k + dim).load(LANES) for k in keys]
                _multiply(code, chunks, [row + dim for row in rows], sums)
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


def weigh(code: Code, unit: Unit, low: Value, high: Value, start: Value, slot: Slot) -> None:
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
                scaled = code.select(is_seen, place.load(LANES) * unit.scale, float("-inf"))
                place.store(scaled)
                largest.set(code.select(scaled > largest.value, scaled, largest.value))
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


def mix(code: Code, unit: Unit, low: Value, high: Value, start: Value, slot: Slot) -> None:
    """Write the sums of weighted values of keys low, ..., high - 1."""
    scores = unit.scores + (-start * ROWS)
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
    unit: Unit,
    scores: Pointer,
    slot: Slot,
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


def join(code: Code, unit: Unit, slot: Slot) -> None:
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

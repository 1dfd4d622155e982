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

from prfaas.engine.native.attention_block import join, mix, score, weigh
from prfaas.engine.native.attention_unit import (
    ARGUMENTS,
    KEY_BLOCK,
    LANES,
    LOWEST,
    ROWS,
    Unit,
)
from prfaas.engine.native.code import Code, Value
from prfaas.engine.native.exp import exp
from prfaas.engine.native.kernel import Kernel, Task


@cache
def attention_kernel() -> Kernel:
    """Return the kernel, which takes ARGUMENTS and trusts them."""
    return Kernel("attention", ARGUMENTS, _write)


def _write(task: Task) -> None:
    code = task.code
    with task.units(task.number("num_units")) as number:
        unit = Unit(task, number)
        _take_queries(task, unit)
        _clear(code, unit)
        with code.loop(unit.first_block, unit.end_block) as block:
            start = block * KEY_BLOCK
            low = code.larger(unit.low, start)
            high = code.smaller(unit.high, start + KEY_BLOCK)
            slot = unit.slot(block)
            with code.when(low < high):
                score(code, unit, low, high, start)
                weigh(code, unit, low, high, start, slot)
                mix(code, unit, low, high, start, slot)
            with code.otherwise(unit.is_split):
                join(code, unit, slot)
        is_last = code.variable(unit.is_split)
        with code.when(unit.is_split):
            before = (task.pointer("counters") + unit.counter).fetch_add(1)
            is_last.set(before.equals(unit.num_splits - 1))
        with code.when(is_last.value):
            first = unit.low // KEY_BLOCK
            with code.loop(first, (unit.high - 1) // KEY_BLOCK + 1) as block:
                join(code, unit, unit.slot(block))
        with code.when(is_last.value | unit.is_whole):
            _finish(task, unit)


def _take_queries(task: Task, unit: Unit) -> None:
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
        first = code.larger(position - task.number("window") + 1, 0)
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


def _clear(code: Code, unit: Unit) -> None:
    """Have seen nothing."""
    with code.loop(0, unit.groups * ROWS, ROWS) as row:
        (unit.state.largest + row).store(code.real(LOWEST, ROWS))
        (unit.state.sums + row).store(code.real(0.0, ROWS))
    with code.loop(0, unit.groups * unit.value_vectors * (ROWS * LANES), LANES) as index:
        (unit.state.results + index).store(code.real(0.0, LANES))


def _finish(task: Task, unit: Unit) -> None:
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

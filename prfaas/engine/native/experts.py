"""Which experts a token takes, and how much of each: a kernel of a CPU.

A row's bits follow from the row alone. Of experts that are equally good the one of the smaller number
is taken; sums are taken in fixed lanes, or in the order in which experts are returned.

Shapes: T tokens, E experts, K experts of a token, G groups of experts.
"""

from collections.abc import Callable
from functools import cache
from typing import assert_never

import torch
from torch import Tensor

from prfaas.engine.ffn_spec import MoeSpec
from prfaas.engine.native.activations import ACTIVATIONS
from prfaas.engine.native.code import I64, Code, Pointer, Value
from prfaas.engine.native.exp import exp
from prfaas.engine.native.kernel import Argument, Kernel, Task, address

LANES = 8
SMALLEST_SUM = 1e-20
"""Joins what scores are divided by."""
SERIAL_VALUES = 8_192
"""So many are done before other threads have woken up."""
UNIT_ROWS = 8
LOWEST = float("-inf")
EMPTY = -1


def choose_experts(
    logits_TE: Tensor, selection_bias_E: Tensor | None, spec: MoeSpec
) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights, [T, K] both, best first.

    Args:
        logits_TE: the router's, float32; a row's lie side by side.
        selection_bias_E: joins the scores for the choice, not for the weights; contiguous float32.
        spec: how experts are chosen and weighted.
    """
    num_rows, num_experts = logits_TE.shape
    assert num_experts == spec.num_experts
    assert logits_TE.is_cpu
    assert logits_TE.dtype == torch.float32
    assert logits_TE.stride(1) == 1 or num_experts == 1
    if selection_bias_E is not None:
        assert selection_bias_E.shape == (num_experts,)
        assert selection_bias_E.dtype == torch.float32
        assert selection_bias_E.is_contiguous()
    chosen_TK = torch.empty(num_rows, spec.experts_per_token, dtype=torch.int64)
    weights_TK = torch.empty(num_rows, spec.experts_per_token)
    if num_rows:
        _kernel(spec, selection_bias_E is not None)(
            logits_TE.data_ptr(),
            logits_TE.stride(0),
            address(selection_bias_E),
            chosen_TK.data_ptr(),
            weights_TK.data_ptr(),
            num_rows,
            threads=1 if num_rows * num_experts <= SERIAL_VALUES else None,
        )
    return chosen_TK, weights_TK


ARGUMENTS: dict[str, Argument] = {
    "logits": "float32*",
    "logits_row": "int",
    "bias": "float32*",
    "chosen": "int64*",
    "weights": "float32*",
    "num_rows": "int",
}


@cache
def _kernel(spec: MoeSpec, has_bias: bool) -> Kernel:
    def body(task: Task) -> None:
        code, num_rows = task.code, task.number("num_rows")
        row_writer = _Row(task, spec, has_bias=has_bias)
        with task.units((num_rows + (UNIT_ROWS - 1)) // UNIT_ROWS) as unit:
            first = unit * UNIT_ROWS
            with code.loop(first, code.smaller(first + UNIT_ROWS, num_rows)) as row:
                row_writer.write(row)

    return Kernel("choose_experts", ARGUMENTS, body)


class _Row:
    """Writes the code for a row. Scratch is filled up to whole vectors with what is never chosen."""

    def __init__(self, task: Task, spec: MoeSpec, *, has_bias: bool) -> None:
        self.task, self.spec, self.has_bias = task, spec, has_bias
        self.code = code = task.code
        padded = -(-spec.num_experts // LANES) * LANES
        self.whole = range(0, padded, LANES)
        self.scores, self.selection = code.stack(padded), code.stack(padded)
        self.best = _Best(code, spec.experts_per_token)
        self.best_groups = _Best(code, spec.groups_per_token)

    def write(self, row: Value) -> None:
        """Write the choice and the weights of one row."""
        code, spec, task = self.code, self.spec, self.task
        self._take_logits(task.pointer("logits") + row * task.number("logits_row"))
        match spec.router:
            case "softmax":
                self._make_softmax()
            case "sigmoid":
                self._each_vector(lambda x: ACTIVATIONS["sigmoid"](code, x))
            case "top_softmax":
                pass
            case other:
                assert_never(other)
        self._select()
        if spec.num_groups > spec.groups_per_token:
            self._keep_best_groups()
        self.best.clear()
        with code.loop(0, spec.num_experts) as expert:
            self.best.offer((self.selection + expert).load(), expert)
        self._write_weights(row)

    def _each_vector(self, compute: Callable[[Value], Value]) -> None:
        with self.code.loop(0, self.whole.stop, LANES) as at:
            (self.scores + at).store(compute((self.scores + at).load(LANES)))

    def _take_logits(self, logits: Pointer) -> None:
        """Copy the row's logits to the scores."""
        code, tail = self.code, self.spec.num_experts % LANES
        whole = self.spec.num_experts - tail
        with code.loop(0, whole, LANES) as at:
            (self.scores + at).store((logits + at).load(LANES))
        if tail:
            rest = (logits + whole).load_some(code.whole(tail), LANES)
            is_there = code.ints(range(LANES)) < tail
            (self.scores + whole).store(code.select(is_there, rest, LOWEST))

    def _make_softmax(self) -> None:
        code, scores = self.code, self.scores
        most = code.variable(code.real(LOWEST, LANES))
        with code.loop(0, self.whole.stop, LANES) as at:
            x = (scores + at).load(LANES)
            most.set(code.select(x > most.value, x, most.value))
        largest = most.value
        while largest.lanes > 1:
            low, high = _halves(code, largest)
            largest = code.select(low > high, low, high)
        largest = code.splat(code.lane(largest, 0), LANES)
        total = code.variable(code.real(0.0, LANES))
        with code.loop(0, self.whole.stop, LANES) as at:
            weight = exp(code, (scores + at).load(LANES) - largest)
            (scores + at).store(weight)
            total.set(total.value + weight)
        sums = total.value
        while sums.lanes > 1:
            low, high = _halves(code, sums)
            sums = low + high
        divisor = code.splat(code.lane(sums, 0), LANES)
        self._each_vector(lambda x: x / divisor)

    def _select(self) -> None:
        """Write what the choice goes by."""
        code = self.code
        with code.loop(0, self.spec.num_experts) as expert:
            x = (self.scores + expert).load()
            if self.has_bias:
                x = x + (self.task.pointer("bias") + expert).load()
            (self.selection + expert).store(x)

    def _keep_best_groups(self) -> None:
        """Leave only the experts of the best groups: those whose best two are most together."""
        code, spec = self.code, self.spec
        size = spec.num_experts // spec.num_groups
        self.best_groups.clear()
        with code.loop(0, spec.num_groups) as group:
            two = _Best(code, min(2, size))
            two.clear()
            with code.loop(group * size, (group + 1) * size) as expert:
                two.offer((self.selection + expert).load(), expert)
            score = two.value(0)
            if size > 1:
                score = score + two.value(1)
            self.best_groups.offer(score, group)
        with code.loop(0, spec.num_groups) as group:
            is_in = code.variable(code.whole(0))
            for place in range(spec.groups_per_token):
                with code.when(self.best_groups.number(place).equals(group)):
                    is_in.set(code.whole(1))
            with code.when(is_in.value < 1), code.loop(group * size, (group + 1) * size) as expert:
                (self.selection + expert).store(code.real(LOWEST))

    def _write_weights(self, row: Value) -> None:
        code, spec, task = self.code, self.spec, self.task
        count = spec.experts_per_token
        chosen = task.pointer("chosen") + row * count
        weights = task.pointer("weights") + row * count
        first = (self.scores + self.best.number(0)).load()
        total = code.variable(code.real(0.0))
        with code.loop(0, count) as place:
            number = (self.best.numbers + place).load()
            weight = (self.scores + number).load()
            if spec.router == "top_softmax":
                weight = exp(code, weight - first)
            total.set(total.value + weight)
            (chosen + place).store(number)
            (weights + place).store(weight)
        divisor = total.value
        if spec.router != "top_softmax":
            divisor = divisor + SMALLEST_SUM
        with code.loop(0, count) as place:
            weight = (weights + place).load()
            if spec.router == "top_softmax" or spec.is_renormalised:
                weight = weight / divisor
            (weights + place).store(weight * spec.routed_scale)


class _Best:
    """The best few of the numbers offered, best first; of equals the first offered, and NaNs before all.

    Nobody asks before as many were offered.
    """

    def __init__(self, code: Code, count: int) -> None:
        self._code, self._count = code, count
        self._values, self.numbers = code.stack(count), code.stack(count, I64)

    def clear(self) -> None:
        """Forget all."""
        for place in range(self._count):
            (self._values + place).store(self._code.real(LOWEST))
            (self.numbers + place).store(self._code.whole(EMPTY))

    def value(self, place: int) -> Value:
        """Return what was offered for a place."""
        return (self._values + place).load()

    def number(self, place: int) -> Value:
        """Return whose it was."""
        return (self.numbers + place).load()

    def offer(self, x: Value, number: Value) -> None:
        """Put x in its place, if it has one."""
        code, last = self._code, self._count - 1
        with code.when(self._is_before(x, code.whole(last))):
            with code.loop(0, last) as step:
                here = code.whole(last) - step
                above = here - 1
                moves_down = self._is_before(x, above)
                with code.when(moves_down):
                    self._put(here, (self._values + above).load(), (self.numbers + above).load())
                with code.otherwise(moves_down), code.when(self._is_before(x, here)):
                    self._put(here, x, number)
            with code.when(self._is_before(x, code.whole(0))):
                self._put(code.whole(0), x, number)

    def _put(self, place: Value, x: Value, number: Value) -> None:
        (self._values + place).store(x)
        (self.numbers + place).store(number)

    def _is_before(self, x: Value, place: Value) -> Value:
        is_nan = Value(self._code, self._code.builder.not_(x.equals(x).ir))
        is_empty = (self.numbers + place).load().equals(EMPTY)
        return (x > (self._values + place).load()) | is_nan | is_empty


def _halves(code: Code, vector: Value) -> tuple[Value, Value]:
    half = vector.lanes // 2
    low = code.shuffle(vector, vector, range(half))
    return low, code.shuffle(vector, vector, range(half, 2 * half))

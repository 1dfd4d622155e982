"""The folds of linear mixers, token by token: kernels of a CPU.

A head's state S [K, V] takes one token after another, each in the same roundings, so that what it
is after a token, and what that token gets, follow from the tokens alone, however they were cut.
Columns of S do not see each other: a unit of work is a tile of columns of one head of one sequence,
which stays in the first cache while all tokens of a segment pass through it.

Shapes: T tokens, H heads, h key heads (each serves H / h heads), K key dim, V value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from prfaas.engine.native.code import F32, I64, Pointer, Value, Variable
from prfaas.engine.native.kernel import Argument, Kernel, Task, address

LANES = 8
NUM_VECTORS = 4
TILE = LANES * NUM_VECTORS
"""Columns that a unit walks with; more vectors than registers hold would wait for memory."""
PIECE_WORDS, STOP_WORDS = 4, 2

Rule = Literal["delta", "delta-by-channel", "linear", "linear-constant"]
"""delta: S <- g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q; one g for a head's token.
delta-by-channel: a g for each row of S.
linear: S <- g S + k (beta v)^T; o = S^T q + skip v.
linear-constant: S <- S + loss S + k v^T, with one loss for a head: what is 1 - loss near 1 would
round by as much as it decays, at each token the same way.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next tokens of one sequence: rows start, ..., stop - 1 of all arrays."""

    start: int
    stop: int
    state_HKV: Tensor
    """Before the first of them; contiguous."""
    ends: Sequence[tuple[int, Tensor]]
    """Rows, ascending, `stop` the last, and where the state after the rows before each goes: [H, K, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the tokens bring, in float32; the last dimension of every array is dense."""

    q_ThK: Tensor
    k_ThK: Tensor
    v_THV: Tensor
    decay: Tensor
    """[T, H] or, by channel, [T, H, K]; constant: the loss, [H]."""
    beta_TH: Tensor | None = None
    """None where the rule is constant."""
    q_scale_Th: Tensor | None = None
    """Delta rules: multiplies q."""
    k_scale_Th: Tensor | None = None
    """Delta rules: multiplies k."""
    skip_H: Tensor | None = None
    """Linear rule."""
    scale: float = 1.0
    """Linear rules: multiplies S^T q."""


def walk(rule: Rule, inputs: Inputs, pieces: Sequence[Piece], out_THV: Tensor) -> None:
    """Write the outputs of all pieces' rows, and their states."""
    q_ThK, k_ThK, v_THV, decay = inputs.q_ThK, inputs.k_ThK, inputs.v_THV, inputs.decay
    num_rows, num_heads, value_dim = v_THV.shape
    num_key_heads, key_dim = q_ThK.shape[1:]
    is_constant, is_by_channel = rule == "linear-constant", rule == "delta-by-channel"
    by_row = () if is_constant else (num_rows,)
    by_channel = (key_dim,) if is_by_channel else ()
    assert k_ThK.shape == q_ThK.shape == (num_rows, num_key_heads, key_dim)
    assert num_heads % num_key_heads == 0
    assert out_THV.shape == v_THV.shape
    assert decay.shape == (*by_row, num_heads, *by_channel)
    rows = [q_ThK, k_ThK, v_THV, decay, out_THV]
    scales = [inputs.q_scale_Th, inputs.k_scale_Th] if rule.startswith("delta") else []
    for scale_Th in scales:
        assert scale_Th is not None
        assert scale_Th.shape == (num_rows, num_key_heads)
    if not is_constant:
        assert inputs.beta_TH is not None
        assert inputs.beta_TH.shape == (num_rows, num_heads)
        scales.append(inputs.beta_TH)
    if rule == "linear":
        assert inputs.skip_H is not None
        assert inputs.skip_H.shape == (num_heads,)
        scales.append(inputs.skip_H)
    for tensor in (*rows, *(scale for scale in scales if scale is not None)):
        assert tensor.is_cpu
        assert tensor.dtype == torch.float32
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    for tensor in (q_ThK, k_ThK, v_THV, out_THV):
        assert tensor.stride(1) == tensor.shape[2] or tensor.shape[1] == 1
    assert not is_by_channel or decay.stride(1) == key_dim or num_heads == 1
    if not pieces:
        return
    table = _table(pieces, num_rows, (num_heads, key_dim, value_dim))
    num_threads = torch.get_num_threads()
    room = torch.empty(num_threads, key_dim, TILE)
    _kernel(rule)(
        q_ThK.data_ptr(),
        q_ThK.stride(0),
        k_ThK.data_ptr(),
        k_ThK.stride(0),
        v_THV.data_ptr(),
        v_THV.stride(0),
        decay.data_ptr(),
        0 if is_constant else decay.stride(0),
        address(inputs.beta_TH),
        0 if inputs.beta_TH is None else inputs.beta_TH.stride(0),
        address(inputs.q_scale_Th),
        0 if inputs.q_scale_Th is None else inputs.q_scale_Th.stride(0),
        address(inputs.k_scale_Th),
        0 if inputs.k_scale_Th is None else inputs.k_scale_Th.stride(0),
        address(inputs.skip_H),
        inputs.scale,
        out_THV.data_ptr(),
        out_THV.stride(0),
        table.data_ptr(),
        len(pieces),
        num_heads,
        num_heads // num_key_heads,
        key_dim,
        value_dim,
        room.data_ptr(),
        threads=num_threads,
    )


def _table(pieces: Sequence[Piece], num_rows: int, shape: tuple[int, int, int]) -> Tensor:
    """Return what the kernel reads of pieces: PIECE_WORDS of each, then STOP_WORDS of each end."""
    words: list[int] = []
    ends: list[int] = []
    for piece in pieces:
        assert 0 <= piece.start < piece.stop <= num_rows
        states = [piece.state_HKV, *(state for _, state in piece.ends)]
        for state in states:
            assert state.shape == shape
            assert state.dtype == torch.float32
            assert state.is_contiguous()
        rows = [row for row, _ in piece.ends]
        assert rows == sorted(set(rows))
        assert rows[0] > piece.start
        assert rows[-1] == piece.stop
        first = PIECE_WORDS * len(pieces) + len(ends)
        words += [piece.start, piece.stop, piece.state_HKV.data_ptr(), first]
        for row, state in piece.ends:
            ends += [row, state.data_ptr()]
    return torch.tensor(words + ends)


ARGUMENTS: dict[str, Argument] = {
    "q": "float32*",
    "q_row": "int",
    "k": "float32*",
    "k_row": "int",
    "v": "float32*",
    "v_row": "int",
    "decay": "float32*",
    "decay_row": "int",
    "beta": "float32*",
    "beta_row": "int",
    "q_scale": "float32*",
    "q_scale_row": "int",
    "k_scale": "float32*",
    "k_scale_row": "int",
    "skip": "float32*",
    "scale": "float",
    "out": "float32*",
    "out_row": "int",
    "table": "int64*",
    "num_pieces": "int",
    "num_heads": "int",
    "heads_per_key": "int",
    "key_dim": "int",
    "value_dim": "int",
    "room": "float32*",
}


@cache
def _kernel(rule: Rule) -> Kernel:
    """Return the kernel of a rule."""

    def body(task: Task) -> None:
        num_heads = task.number("num_heads")
        num_tiles = (task.number("value_dim") + (TILE - 1)) // TILE
        num_units = task.number("num_pieces") * num_heads * num_tiles
        with task.units(num_units) as unit:
            head = unit // num_tiles
            tile = _Tile(
                task,
                rule,
                piece=head // num_heads,
                head=head % num_heads,
                first_column=unit % num_tiles * TILE,
            )
            tile.walk()

    return Kernel(f"walk_{rule.replace('-', '_')}", ARGUMENTS, body)


class _Tile:
    """Writes the code that takes a piece's tokens through TILE columns of one head's state.

    The state goes from `source` to `target` as a token changes it: from the state before the piece
    to the thread's room, within the room, and to each end's own memory. A tile with less than TILE
    columns stays in the room, zeros beside it, and is copied.
    """

    def __init__(
        self,
        task: Task,
        rule: Rule,
        *,
        piece: Value,
        head: Value,
        first_column: Value,
    ) -> None:
        self.code = task.code
        self.task, self.rule, self.head = task, rule, head
        self.is_delta, self.is_by_channel = rule.startswith("delta"), rule == "delta-by-channel"
        self.key_dim, self.value_dim = task.number("key_dim"), task.number("value_dim")
        self.first_column = first_column
        num_columns = self.value_dim - first_column
        self.is_whole = num_columns >= TILE
        self.columns = [(j * LANES, num_columns - j * LANES) for j in range(NUM_VECTORS)]
        self.room = task.pointer("room") + task.worker * (self.key_dim * TILE)
        words = task.pointer("table") + piece * PIECE_WORDS
        self.start, self.stop = words.load(), (words + 1).load()
        self.state_place = words + 2
        self.first_end = task.pointer("table") + (words + 3).load()
        self.key_head = head // task.number("heads_per_key")

    def walk(self) -> None:
        """Write the walk over all tokens."""
        code = self.code
        room = code.variable(Value(code, self.room.ir))
        source = code.variable(Value(code, self._state_tile(self.state_place).ir))
        source_row = code.variable(self.value_dim)
        with code.otherwise(self.is_whole):
            self._fetch(Pointer(code, source.value.ir, F32))
            source.set(room.value)
            source_row.set(code.whole(TILE))
        end = code.variable(Value(code, self.first_end.ir))
        seen = [code.variable(code.real(0.0, LANES)) for _ in range(NUM_VECTORS)]
        if self.is_delta:
            self._see_first(Pointer(code, source.value.ir, F32), source_row.value, seen)
        with code.loop(self.start, self.stop) as row:
            end_words = Pointer(code, end.value.ir, I64)
            is_end = (row + 1).equals(end_words.load())
            is_direct = is_end & self.is_whole
            target = code.variable(room.value)
            target_row = code.variable(code.whole(TILE))
            with code.when(is_direct):
                target.set(Value(code, self._state_tile(end_words + 1).ir))
                target_row.set(self.value_dim)
            self._take(
                row,
                Pointer(code, source.value.ir, F32),
                source_row.value,
                Pointer(code, target.value.ir, F32),
                target_row.value,
                seen,
            )
            source.set(target.value)
            source_row.set(target_row.value)
            with code.when(is_end):
                with code.otherwise(self.is_whole):
                    self._store(self._state_tile(end_words + 1))
                end.set(Value(code, (end_words + STOP_WORDS).ir))

    def _state_tile(self, place: Pointer) -> Pointer:
        """Return where the tile begins in the [H, K, V] whose address is at `place`."""
        offset = self.head * (self.key_dim * self.value_dim) + self.first_column
        return place.load_pointer(F32) + offset

    def _fetch(self, state: Pointer) -> None:
        """Copy a narrow tile to the room."""
        with self.code.loop(0, self.key_dim) as i:
            for at, count in self.columns:
                s = (state + (i * self.value_dim + at)).load_some(count, LANES)
                (self.room + (i * TILE + at)).store(s)

    def _store(self, state: Pointer) -> None:
        """Copy a narrow tile from the room."""
        with self.code.loop(0, self.key_dim) as i:
            for at, count in self.columns:
                s = (self.room + (i * TILE + at)).load(LANES)
                (state + (i * self.value_dim + at)).store_some(s, count)

    def _row_of(self, name: str, row: Value, offset: Value) -> Pointer:
        return self.task.pointer(name) + (row * self.task.number(f"{name}_row") + offset)

    def _keys(self, name: str, row: Value) -> Pointer:
        return self._row_of(name, row, self.key_head * self.key_dim)

    def _decays(self, row: Value) -> Pointer:
        """Return a token's decay, or the first of its channels'."""
        offset = self.head * self.key_dim if self.is_by_channel else self.head
        return self._row_of("decay", row, offset)

    def _see_first(self, source: Pointer, source_row: Value, seen: list[Variable]) -> None:
        """Write S^T k of the first token, as `_take` does for those after it."""
        code = self.code
        k, decays = self._keys("k", self.start), self._decays(self.start)
        with code.loop(0, self.key_dim) as i:
            k_i = self._next_key(k, decays, i)
            for j, total in enumerate(seen):
                s = (source + (i * source_row + j * LANES)).load(LANES)
                total.set(code.fma(k_i, s, total.value))

    def _next_key(self, k: Pointer, decays: Pointer, i: Value) -> Value:
        """Return the key's number in all lanes, times the decay of the state that it will see."""
        k_i = (k + i).load()
        if self.is_by_channel:
            k_i = k_i * (decays + i).load()
        return self.code.splat(k_i, LANES)

    def _take(
        self,
        row: Value,
        source: Pointer,
        source_row: Value,
        target: Pointer,
        target_row: Value,
        seen: list[Variable],
    ) -> None:
        """Write one token's change of the state, what it gets, and what the next one's key sees."""
        code = self.code
        q, k, decays = self._keys("q", row), self._keys("k", row), self._decays(row)
        decay = None if self.is_by_channel else code.splat(decays.load(), LANES)
        added = [code.variable(vector) for vector in self._added(row, seen, decay)]
        outs = [code.variable(code.real(0.0, LANES)) for _ in range(NUM_VECTORS)]
        following = code.smaller(row + 1, self.stop - 1)
        next_k, next_decays = self._keys("k", following), self._decays(following)
        with code.loop(0, self.key_dim) as i:
            k_i, q_i = (code.splat((x + i).load(), LANES) for x in (k, q))
            g_i = code.splat((decays + i).load(), LANES) if decay is None else decay
            next_k_i = self._next_key(next_k, next_decays, i) if self.is_delta else None
            for j in range(NUM_VECTORS):
                s = (source + (i * source_row + j * LANES)).load(LANES)
                kept = code.fma(s, g_i, s) if self.rule == "linear-constant" else s * g_i
                s = code.fma(k_i, added[j].value, kept)
                (target + (i * target_row + j * LANES)).store(s)
                outs[j].set(code.fma(q_i, s, outs[j].value))
                if next_k_i is not None:
                    seen[j].set(code.fma(next_k_i, s, seen[j].value))
        self._give(row, [out.value for out in outs])

    def _v(self, row: Value) -> list[Value]:
        """Return the token's values of the tile; zeros past the last column."""
        v = self._row_of("v", row, self.head * self.value_dim + self.first_column)
        return [(v + at).load_some(count, LANES) for at, count in self.columns]

    def _added(self, row: Value, seen: list[Variable], decay: Value | None) -> list[Value]:
        """Return what the token's key adds to its rows; what it saw is used up."""
        code, v = self.code, self._v(row)
        if self.rule == "linear-constant":
            return v
        beta = code.splat(self._row_of("beta", row, self.head).load(), LANES)
        if not self.is_delta:
            return [v_j * beta for v_j in v]
        k_scale = code.splat(self._row_of("k_scale", row, self.key_head).load(), LANES)
        seen_scale = k_scale if decay is None else k_scale * decay
        factor = beta * k_scale
        added = []
        for v_j, total in zip(v, seen, strict=True):
            added.append(code.fma(-seen_scale, total.value, v_j) * factor)
            total.set(code.real(0.0, LANES))
        return added

    def _give(self, row: Value, outs: list[Value]) -> None:
        """Write the token's output."""
        code, task = self.code, self.task
        if self.is_delta:
            scale = self._row_of("q_scale", row, self.key_head).load()
        else:
            scale = task.number("scale")
        scaled = [out * code.splat(scale, LANES) for out in outs]
        if self.rule == "linear":
            skip = code.splat((task.pointer("skip") + self.head).load(), LANES)
            scaled = [code.fma(skip, v, out) for v, out in zip(self._v(row), scaled, strict=True)]
        out_row = self._row_of("out", row, self.head * self.value_dim + self.first_column)
        for (at, count), out in zip(self.columns, scaled, strict=True):
            (out_row + at).store_some(out, count)

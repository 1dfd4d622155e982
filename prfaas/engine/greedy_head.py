"""The id of a row's largest logit, found by an int8 copy of the head and proved by the head itself.

The copy takes half the bytes of a float16 head and, for several rows, a third of its time. It never
gives a result: it leaves out the ids whose logit cannot be the largest, and the few that are left are
computed by the head's own kernel, so the answer is the one that all logits give, ties included.

What is left out is proved so. Both sides of w x are turned by one orthogonal matrix, which keeps the
product and spreads outliers over all dimensions, and rounded to integers: w to 8 bits by row, x to 7.
The product of the integers is exact, and what rounding changed is at most |w - w'| |x| + |w'| |x - x'|,
of which the first norm is known for each w and the others are taken as they come. An id stays if with
that it could reach the logit of the row's best guess.

Shapes: T padded rows, M rows that count, V vocabulary, D model dim, C chunks of CHUNK ids, N ids.
"""

import math
import warnings
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prfaas.engine.linear import SHARD_OUTPUTS, Linear, pack, padded_rows

CHUNK = 64
"""Ids whose largest product is looked at first."""
WEIGHT_LEVELS = 127
ROW_LEVELS = 63
"""fbgemm adds pairs of products of unsigned rows and weights in 16 bits: 127 * 127 * 2 fits."""
ROW_ZERO = 64
PANEL_OUTPUTS = 16
"""fbgemm rounds what is left over of its panels otherwise, where there are over 512 inputs."""
SCORED_OUTPUTS = 32
"""Whole panels of fbgemm on any machine: with AVX-512 one has 32 outputs."""
SLAB_ROWS = 512
"""Rows rounded at once: they stay in cache."""
MAX_CANDIDATES = 256
"""Of one row; with more all logits are as fast."""
MIN_NORM = 1e-15
"""Of shorter rows the squares underflow, and the norm is no bound."""
MAX_HADAMARD = 128

Ids = NDArray[np.int64]
Float32s = NDArray[np.float32]


class GreedyHead:
    """The head of one model, packed as "fbgemm-fp16", for those who want the largest logit only.

    Args:
        weight_VD: the head, any float dtype; kept, and read where candidates are. V is a multiple
            of PANEL_OUTPUTS.
        head: the packed head.
        logits_scale: what the model multiplies logits by, more than 0; it can make two of them equal.
        pool: shares the work of packing.
    """

    def __init__(
        self,
        weight_VD: Tensor,
        head: Linear,
        *,
        logits_scale: float = 1.0,
        pool: Executor | None = None,
    ) -> None:
        num_outputs, num_inputs = weight_VD.shape
        assert num_outputs % PANEL_OUTPUTS == 0
        self._weight_VD = weight_VD
        self._head = head
        self._logits_scale = logits_scale
        self._hadamard, self._cosines = _turning(num_inputs)
        shards = torch.split(weight_VD, SHARD_OUTPUTS)
        packed = list((map if pool is None else pool.map)(self._pack, shards))
        self._shards = [shard for shard, _, _ in packed]
        self._errors_CN = torch.cat([errors for _, errors, _ in packed]).view(-1, CHUNK).numpy()
        self._peak_errors_C = torch.from_numpy(self._errors_CN.max(axis=1))
        self._max_norm = max(norm for _, _, norm in packed)
        # Of all float32 sums, whatever their order: those of the head, of norms, and of turning w and
        # x, where n products of a row of |A| come to n**1.5. In eps / 2 at most 3 D + 3 turns + 22.
        turns = sum(len(matrix) ** 1.5 for matrix in (self._hadamard, self._cosines))
        self._rounding = (2 * num_inputs + 2 * turns + 32) * torch.finfo(torch.float32).eps

    def _turn(self, x_TD: Tensor) -> Tensor:
        """Return the rows in the basis that spreads outliers."""
        x_TPQ = x_TD.view(len(x_TD), len(self._cosines), len(self._hadamard))
        return (self._cosines @ (x_TPQ @ self._hadamard)).flatten(1)

    def _pack(self, shard_VD: Tensor) -> tuple[Any, Tensor, float]:
        """Return the packed integers, what rounding changed in each row, and the largest norm.

        Rows are added up to a whole chunk; nothing can make their logit the largest.
        """
        num_rows, num_inputs = shard_VD.shape
        padded = -(-num_rows // CHUNK) * CHUNK
        levels_VD = torch.zeros(padded, num_inputs, dtype=torch.int8)
        scales_V, errors_V = torch.ones(padded), torch.full((padded,), -math.inf)
        max_norm = 0.0
        for start in range(0, num_rows, SLAB_ROWS):
            stop = min(start + SLAB_ROWS, num_rows)
            turned_ND = self._turn(shard_VD[start:stop].half().float())
            norms_N = torch.linalg.vector_norm(turned_ND, dim=1)
            scales_N1 = turned_ND.abs().amax(1, keepdim=True).clamp_(min=1e-30) / WEIGHT_LEVELS
            rounded_ND = (turned_ND / scales_N1).round_()
            levels_VD[start:stop] = rounded_ND
            changes_ND = turned_ND.addcmul_(rounded_ND, scales_N1, value=-1.0)
            scales_V[start:stop] = scales_N1[:, 0]
            errors_V[start:stop] = torch.linalg.vector_norm(changes_ND, dim=1)
            max_norm = max(max_norm, float((norms_N + errors_V[start:stop]).max()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this maker of integer tensors is to go, says torch
            integers = torch._make_per_channel_quantized_tensor(  # noqa: SLF001
                levels_VD, scales_V.double(), torch.zeros(padded, dtype=torch.int64), 0
            )
        packed = torch.ops.quantized.linear_prepack(integers, None)
        return packed, errors_V, max_norm

    def largest(self, x_TD: Tensor, num_rows: int) -> list[int] | None:
        """Return the id of the largest logit of the first rows, the smallest id of equals.

        Rows of which too many ids could be it get all logits. None: a row is zero, nearly so, or not finite.

        Args:
            x_TD: rows of the head's input, padded as its packing asks.
            num_rows: how many count.
        """
        x_MD = x_TD[:num_rows]
        norms_M = x_MD.norm(dim=1)
        if not (norms_M.isfinite() & (norms_M > MIN_NORM)).all():
            return None
        turned_MD = self._turn(x_MD)
        steps_M = turned_MD.abs().amax(1).clamp_(min=1e-30) / ROW_LEVELS
        levels_MD = (turned_MD / steps_M[:, None]).round_()
        errors_M = (turned_MD - levels_MD * steps_M[:, None]).norm(dim=1)
        slacks_M = self._max_norm * (errors_M + self._rounding * norms_M)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        products = [multiply(levels_MD, 1.0, ROW_ZERO, shard) for shard in self._shards]
        bounds = _Bounds(
            products=[product.numpy() for product in products],
            steps=steps_M.tolist(),
            norms=norms_M.tolist(),
            slacks=slacks_M.tolist(),
            errors=self._errors_CN,
        )
        peaks_MC = torch.cat([p.view(num_rows, -1, CHUNK).amax(-1) for p in products], dim=1)
        peaks_MC.mul_(steps_M[:, None]).addcmul_(norms_M[:, None], self._peak_errors_C)
        guesses_M = torch.tensor(
            [bounds.best(m, c) for m, c in enumerate(peaks_MC.argmax(1).tolist())]
        )
        guessed_MD = self._weight_VD[guesses_M].half().float()
        floors_M = (guessed_MD * x_MD).sum(1) - self._rounding * self._max_norm * norms_M
        could_MC = peaks_MC >= (floors_M - slacks_M)[:, None]
        left: dict[int, Ids] = {}
        for row, floor in enumerate(floors_M.tolist()):
            chunks = could_MC[row].nonzero()[:, 0].tolist()
            if len(chunks) <= MAX_CANDIDATES:
                ids = np.concatenate([bounds.reaching(row, chunk, floor) for chunk in chunks])
                if len(ids) <= MAX_CANDIDATES:
                    left[row] = ids
        best = dict.fromkeys(range(num_rows), 0)
        if left:
            ids = np.unique(np.concatenate([*left.values()]))
            logits = self.score(x_TD, torch.from_numpy(ids)).mul_(self._logits_scale).numpy()
            best.update((row, int(ids[logits[row].argmax()])) for row in left)
        if unproved := [row for row in range(num_rows) if row not in left]:
            padding = padded_rows(len(unproved), "fbgemm-fp16") - len(unproved)
            logits_TV = self._head(x_TD[unproved + unproved[:1] * padding])
            found = logits_TV.mul_(self._logits_scale).numpy().argmax(axis=1)
            best.update(zip(unproved, found.tolist(), strict=False))  # behind them is padding
        return [*best.values()]

    def score(self, x_TD: Tensor, ids_N: Tensor) -> Tensor:
        """Return the logits of these ids, [T, N], with the head's own bits."""
        padding = -len(ids_N) % SCORED_OUTPUTS
        padded_N = torch.cat([ids_N, ids_N[:1].expand(padding)])
        packed = torch.ops.quantized.linear_prepack_fp16(self._weight_VD[padded_N].float(), None)
        scores_TN: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_TD, packed)
        return scores_TN[:, : len(ids_N)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """How large each logit could be."""

    products: list[Float32s]
    """Of the rounded rows and shards, [M, V of the shard]; times steps they are logits."""
    steps: list[float]
    norms: list[float]
    slacks: list[float]
    """What may be added for the rounding of x, whatever the id."""
    errors: Float32s
    """The norm of what rounding changed in each row of the head, [C, N]."""

    def _upper(self, row: int, chunk: int) -> Float32s:
        """Return what the logits of a chunk reach if only the head was rounded, [N]."""
        shard, first = divmod(chunk * CHUNK, SHARD_OUTPUTS)
        products_N = self.products[shard][row, first : first + CHUNK]
        upper_N: Float32s = products_N * self.steps[row] + self.errors[chunk] * self.norms[row]
        return upper_N

    def best(self, row: int, chunk: int) -> int:
        """Return the id that reaches highest."""
        return chunk * CHUNK + int(self._upper(row, chunk).argmax())

    def reaching(self, row: int, chunk: int, floor: float) -> Ids:
        """Return the ids whose logit could be `floor` or more."""
        could_N = self._upper(row, chunk) + self.slacks[row] >= floor
        return np.flatnonzero(could_N) + chunk * CHUNK


def _turning(num_inputs: int) -> tuple[Tensor, Tensor]:
    """Return two orthogonal matrices whose Kronecker product turns rows of `num_inputs`.

    A Hadamard matrix, of which every element counts alike, and a cosine transform.
    """
    size = math.gcd(num_inputs, MAX_HADAMARD)
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], dim=1), torch.cat([hadamard, -hadamard], dim=1)]
        )
    number = num_inputs // size
    index = torch.arange(number, dtype=torch.float64)
    cosines = torch.cos(math.pi / number * (index + 0.5) * index[:, None]) * math.sqrt(2 / number)
    cosines[0] /= math.sqrt(2)
    return hadamard / math.sqrt(size), cosines.float()


def is_available() -> bool:
    """Return whether this build of torch on this machine has what a GreedyHead computes with."""
    weight_VD = torch.eye(CHUNK)
    x_TD = weight_VD[[3] * padded_rows(1, "fbgemm-fp16")]
    try:
        return GreedyHead(weight_VD, pack(weight_VD, "fbgemm-fp16")).largest(x_TD, 1) == [3]
    except (RuntimeError, AttributeError, NotImplementedError):
        return False

"""Takes the tensors of one model by name and packs them.

Shapes: N outputs (rows), K inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prfaas.engine.layers.batch_attention import attention_for
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear, Packing, pack
from prfaas.engine.loading.checkpoint import TensorSource
from prfaas.engine.loading.names import Names, Rows
from prfaas.engine.model_spec import ModelSpec
from prfaas.engine.rope import RopeTable
from prfaas.engine.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Parts of a projection by name: their rows, and their biases if they have any."""

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]

    def reorder(self, part: str, order: Tensor) -> None:
        """Put the rows of each head of `part` in another order, [len(order)] for a head."""
        for tensors in (self.weights, self.biases):
            if part in tensors:
                tensor = tensors[part]
                by_head = tensor.reshape(-1, len(order), *tensor.shape[1:])
                tensors[part] = by_head[:, order].flatten(0, 1)

    def scale(self, part: str, factor: float) -> None:
        """Multiply the outputs of `part` by `factor`."""
        if factor != 1.0:
            for tensors in (self.weights, self.biases):
                if part in tensors:
                    tensors[part] = tensors[part].float() * factor


class Parts:
    """What the builders of mixers and feed-forwards share: a model's tensors, spec and ropes."""

    def __init__(
        self,
        model: ModelSpec,
        names: Names,
        weights: TensorSource,
        packing: Packing,
        device: torch.device,
    ) -> None:
        self.model = model
        self.names = names
        self.weights = weights
        self.packing = packing
        self.attention = attention_for(packing)
        self._device = device
        self._ropes: dict[tuple[RopeSpec, int], RopeTable] = {}

    def add_rope(self, spec: RopeSpec | None, head_dim: int) -> None:
        """Make the table that rope() returns later, when several threads ask for it."""
        if spec is not None and (spec, head_dim) not in self._ropes:
            self._ropes[spec, head_dim] = RopeTable(spec, head_dim, self._device)

    def rope(self, spec: RopeSpec | None, head_dim: int) -> RopeTable | None:
        """Return the one table of this spec and length; None for no positions."""
        return None if spec is None else self._ropes[spec, head_dim]

    def projection(
        self,
        prefix: str,
        stored: Sequence[Rows],
        sizes: Mapping[str, int],
        num_inputs: int,
        *,
        num_groups: int = 1,
        has_bias: bool = False,
    ) -> Projection:
        """Return the parts that `stored` matrices hold, of `sizes` rows each."""
        found = Projection(weights={}, biases={})
        for rows in stored:
            num_rows = sum(sizes[part] for part in rows.parts)
            name = prefix + rows.name
            weight = self.weights.take(f"{name}.weight", num_rows, num_inputs)
            found.weights.update(_split(weight, rows, sizes, num_groups))
            if has_bias:
                bias = self.weights.take(f"{name}.bias", num_rows)
                found.biases.update(_split(bias, rows, sizes, num_groups))
        return found

    def join(self, projection: Projection, order: Sequence[str]) -> Linear:
        """Return one linear layer of the parts in this order."""
        weights = [projection.weights[part] for part in order]
        biases = [projection.biases[part] for part in order if part in projection.biases]
        return self.pack(_cat(weights), _cat(biases) if biases else None)

    def linear(
        self, name: str, num_outputs: int, num_inputs: int, *, has_bias: bool = False
    ) -> Linear:
        """Return a stored linear layer as it is."""
        weight = self.weights.take(f"{name}.weight", num_outputs, num_inputs)
        bias = self.weights.take(f"{name}.bias", num_outputs) if has_bias else None
        return self.pack(weight, bias)

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """Return a linear layer in the model's packing; the tensors may be freed."""
        return pack(weight_NK, self.packing, bias_N)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Return a small tensor as float32 memory of its own."""
        return self.weights.take(name, *shape).to(torch.float32, copy=True)

    def hidden_norm(self, name: str) -> RmsNorm:
        """Return a norm of the hidden size, of the model's own kind."""
        weight = self.weights.take(f"{name}.weight", self.model.hidden_size)
        return RmsNorm(
            weight, self.model.norm_eps, has_unit_offset=self.model.has_unit_offset_norms
        )

    def plain_norm(self, name: str, *shape: int, eps: float | None = None) -> RmsNorm:
        """Return a norm that multiplies by its weight alone; stored flat, whatever the shape."""
        size = torch.Size(shape).numel()
        weight = self.weights.take(f"{name}.weight", size).view(shape)
        return RmsNorm(weight, self.model.norm_eps if eps is None else eps, has_unit_offset=False)

    def conv_weights(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """Return depthwise convolutions of these channels, one after another, [width, channels]."""
        parts = [
            self.weights.take(f"{name}.weight", size, 1, width)
            for name, size in zip(names, sizes, strict=True)
        ]
        return _cat(parts)[:, 0].T.float().contiguous()


def _split(
    tensor: Tensor, rows: Rows, sizes: Mapping[str, int], num_groups: int
) -> dict[str, Tensor]:
    """Return the parts of a stored matrix or bias."""
    groups = num_groups if rows.is_by_group else 1
    by_group = tensor.view(groups, -1, *tensor.shape[1:])
    parts = torch.split(by_group, [sizes[part] // groups for part in rows.parts], dim=1)
    return {name: part.flatten(0, 1) for name, part in zip(rows.parts, parts, strict=True)}


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])

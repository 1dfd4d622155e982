"""Attention and Mamba-2 side by side on the same input (Falcon-H1).

Shapes: T rows, D model dim.
"""

from torch import Tensor

from prfaas.engine.batch import Batch, OnWritten, Rows
from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.mamba2 import Mamba2Mixer
from prfaas.engine.mixer_spec import ParallelSpec


class ParallelMixer:
    """The sum of both mixers' outputs, with each input and output multiplied by the spec's scale.

    The spec's key_scale and mamba_scales are not applied here: they belong to the rows of the
    attention's qkv_proj and of mamba's in_proj.
    """

    def __init__(self, spec: ParallelSpec, *, attention: GqaMixer, mamba: Mamba2Mixer) -> None:
        self.spec = spec
        self.attention = attention
        self.mamba = mamba

    def __call__(self, x_TD: Tensor, rows: Rows, layer: int, on_written: OnWritten) -> Tensor:
        """Return the output rows; calls `on_written` once states, keys and values are in place."""
        spec = self.spec
        mamba_TD = self.mamba(x_TD * spec.mamba_in_scale, rows, layer, _nothing)
        attention_TD = self.attention(x_TD * spec.attention_in_scale, rows, layer, on_written)
        return mamba_TD.mul_(spec.mamba_out_scale).add_(attention_TD.mul_(spec.attention_out_scale))


def _nothing(batch: Batch) -> None:
    """Mamba's states alone are not all that the layer writes."""

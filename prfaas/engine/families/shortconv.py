"""The family with short convolutions: LFM2."""

from prfaas.engine.families.attention import gqa, head_dim_of
from prfaas.engine.families.fields import CONV, FULL, Fields, bad_layer_type
from prfaas.engine.families.ropes import rope
from prfaas.engine.ffn_spec import MlpSpec
from prfaas.engine.mixer_spec import MixerSpec, ShortConvSpec
from prfaas.engine.model_spec import ModelSpec


def lfm2(fields: Fields) -> ModelSpec:
    """Return an LFM2: gated short convolutions but for the layers of full_attn_idxs."""
    listed = fields.items("full_attn_idxs")
    full = set(range(fields.num_layers()) if listed is None else listed)
    kinds = fields.layer_types(lambda layer: FULL if layer in full else CONV)
    rotation = rope(fields, head_dim_of(fields), default_theta=1_000_000.0)
    mixers: dict[str, MixerSpec] = {
        FULL: gqa(fields, rotation, has_qk_norm=True),
        CONV: ShortConvSpec(
            channels=fields.integer("hidden_size"),
            conv_width=fields.integer("conv_L_cache", default=3),
            has_bias=fields.flag("conv_bias"),
        ),
    }
    for kind in kinds:
        if kind not in mixers:
            raise bad_layer_type(kind)
    return fields.model(
        layers=[mixers[kind] for kind in kinds],
        ffns=[MlpSpec(intermediate_size=_intermediate_size(fields))] * len(kinds),
        eps_names=("norm_eps", "block_norm_eps"),
        is_tied=True,
    )


def _intermediate_size(fields: Fields) -> int:
    """Two thirds of the field, times a factor, rounded up to block_multiple_of; or the field."""
    size = fields.integer("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" not in fields:
        return size
    size = int(fields.number("block_ffn_dim_multiplier") * size)
    multiple = fields.integer("block_multiple_of", default=256)
    return -(-size // multiple) * multiple

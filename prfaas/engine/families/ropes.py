"""Reads how a checkpoint rotates q and k, in the fields of transformers 5 or in older ones."""

from collections.abc import Mapping
from typing import Literal

from prfaas.engine.families.fields import CONTEXT_TOKENS, FULL, SLIDING, Fields
from prfaas.engine.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from prfaas.errors import ConfigError

Pairs = Literal["halves", "neighbours"]


def rope(
    fields: Fields,
    head_dim: int,
    *,
    default_theta: float = 10_000.0,
    default_part: float = 1.0,
    pairs: Pairs = "halves",
) -> RopeSpec:
    """Return the rope of a model in which all layers rotate alike."""
    own = fields.section("rope_parameters") or fields
    for kind in (FULL, SLIDING):
        if own is not fields and kind in own:
            fields.refuse(f"rope_parameters of {kind} layers alone")
    theta = own.number("rope_theta", default=fields.number("rope_theta", default=default_theta))
    scaling = own if own is not fields else fields.section("rope_scaling")
    return RopeSpec(
        theta=theta,
        scaling=None if scaling is None else read_scaling(scaling, fields),
        rotary_dim=_rotary_dim(own, fields, head_dim, default_part),
        pairs=pairs,
    )


def ropes_by_layer_type(
    fields: Fields,
    head_dim: int,
    *,
    sliding_theta: float,
    default_theta: float = 10_000.0,
    default_part: float = 1.0,
) -> Mapping[str, RopeSpec]:
    """Return the ropes of full and of sliding layers; older fields scale the full ones only."""
    parameters = fields.section("rope_parameters")
    if parameters is None or not (FULL in parameters or SLIDING in parameters):
        full = rope(fields, head_dim, default_theta=default_theta, default_part=default_part)
        if parameters is not None:
            return {FULL: full, SLIDING: full}
        return {FULL: full, SLIDING: RopeSpec(theta=sliding_theta, rotary_dim=full.rotary_dim)}
    ropes = {}
    for kind in (FULL, SLIDING):
        own = parameters.section(kind)
        if own is None:
            raise ConfigError(f"rope_parameters say nothing of {kind} layers")
        ropes[kind] = RopeSpec(
            theta=own.number("rope_theta"),
            scaling=read_scaling(own, fields),
            rotary_dim=_rotary_dim(own, fields, head_dim, default_part),
        )
    return ropes


def read_scaling(own: Fields, model: Fields) -> RopeScaling | None:
    """Return the scaling that `own` describes; notes one that is not known as unsupported."""
    match kind := own.get("rope_type", "type") or "default":
        case "default" | "mrope":  # mrope of text alone is plain rope
            if own is not model and own.get("factor") not in (None, 1, 1.0):
                model.refuse(f"rope factor={own.get('factor')!r} of rope type {kind!r}")
            return None
        case "linear":
            return LinearScaling(factor=own.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=own.number("factor"),
                low_freq_factor=own.number("low_freq_factor"),
                high_freq_factor=own.number("high_freq_factor"),
                original_context_tokens=_original_tokens(own, model),
            )
        case "yarn":
            return YarnScaling(
                factor=own.number("factor"),
                original_context_tokens=_original_tokens(own, model),
                beta_fast=own.number("beta_fast", default=32.0),
                beta_slow=own.number("beta_slow", default=1.0),
                is_truncated=own.flag("truncate", default=True),
                attention_factor=None
                if own.get("attention_factor") is None
                else own.number("attention_factor"),
                mscale=own.number("mscale") if "mscale" in own else None,
                mscale_all_dim=0.0
                if own.get("mscale_all_dim") in {None, 0}
                else own.number("mscale_all_dim"),
            )
        case _:
            model.refuse(f"rope type {kind!r}")
            return None


def _original_tokens(own: Fields, model: Fields) -> int:
    original = own.optional_integer("original_max_position_embeddings")
    return model.integer(*CONTEXT_TOKENS) if original is None else original


def _rotary_dim(own: Fields, model: Fields, head_dim: int, default_part: float) -> int | None:
    """The dimensions that rotate: rotary_dim, else the integer part of a fraction of the head."""
    dim = model.optional_integer("rotary_dim")
    if dim is None:
        part = own.number(
            "partial_rotary_factor",
            default=model.number("partial_rotary_factor", default=default_part),
        )
        dim = int(head_dim * part)
    if not 0 < dim <= head_dim or dim % 2:
        raise ConfigError(f"{dim} of a head's {head_dim} dimensions cannot rotate in pairs")
    return None if dim == head_dim else dim

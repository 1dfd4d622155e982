"""The grid of absolute positions that linear mixers compute on; torch-free."""

from prfaas.engine.mixer_spec import (
    STATE_DTYPE_BYTES,
    GdnSpec,
    KdaSpec,
    KvDtype,
    LightningSpec,
    Mamba2Spec,
    MixerSpec,
    ParallelSpec,
    state_bytes,
)

CHUNK_TOKENS = 64
"""Linear mixers compute a prompt in chunks between the multiples of this many positions."""


def replay_dim(spec: MixerSpec) -> int | None:
    """Return the width of the rows that strict mode keeps since the last grid line.

    None: the mixer's bits do not depend on the cut, so that it has nothing to replay.
    """
    match spec:
        case GdnSpec():
            return spec.conv_channels + 2 * spec.num_value_heads
        case KdaSpec():
            return 4 * spec.num_heads * spec.head_dim + spec.num_heads
        case LightningSpec():
            return 3 * spec.num_heads * spec.head_dim
        case Mamba2Spec():
            return spec.conv_channels + spec.num_heads
        case ParallelSpec():
            return replay_dim(spec.mamba)
        case _:
            return None


def exported_state_bytes(
    spec: MixerSpec, replay_dim: int | None, kv_dtype: KvDtype = "float32"
) -> int:
    """Return the bytes of one layer's state as it travels, strict mode's rows included."""
    if not spec.states:
        return 0
    rows_bytes = CHUNK_TOKENS * (replay_dim or 0) * STATE_DTYPE_BYTES
    return state_bytes(spec, kv_dtype) + rows_bytes

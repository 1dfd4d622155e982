"""How the engine runs; torch-free."""

from dataclasses import dataclass
from typing import Literal

Numerics = Literal["grid", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of the `[engine]` section."""

    dtype: Literal["float16", "float32"] = "float16"
    """Weight packing on CPU. Activations and KV are float32 either way."""
    numerics: Numerics = "grid"
    """Of linear mixers: equal bits for cuts on the absolute grid of 64 tokens, or strict, for any
    cut and for decode, by replay at a cost. Models of attention alone are always strict."""
    threads: int | None = None
    """Torch threads; None is all cores. Two nodes on one machine: cores / nodes."""
    max_batch_sequences: int = 8
    chunk_tokens: int = 576
    """Prefill tokens of one step; a multiple of the block."""
    kv_ram_bytes: int = 4 << 30
    """Budget for working KV of running sequences; beyond it the youngest is preempted."""
    max_context_tokens: int | None = None
    """Prompt plus completion; None is the model's own limit."""
    max_waiting_requests: int = 256
    """A full queue answers 503."""

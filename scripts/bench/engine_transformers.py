#!/usr/bin/env python
"""transformers in float32 with sdpa attention and a dynamic cache; run by scripts/bench/engine.py."""

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.engine.loader import Weights
from scripts.bench.engine_pipe import serve


class Transformers:
    """A plain model of the checkpoint."""

    def __init__(self, model_dir: Path) -> None:
        import transformers
        from transformers.initialization import no_init_weights

        self._transformers: Any = transformers
        fields = json.loads((model_dir / "config.json").read_text())
        config = transformers.AutoConfig.for_model(**fields)
        auto: Any = transformers.AutoModelForCausalLM
        weights = Weights(model_dir)
        with no_init_weights():
            model = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        state = {name: weights.tensor(name) for name in weights.names}
        missing, unexpected = model.load_state_dict(state, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"transformers wants {missing}, has no place for {unexpected}")
        model.tie_weights()
        self._model: Any = model.eval()
        # transformers 5.24 renamed the parameter and warns about the older name.
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        version = transformers.__version__
        self.about = {"version": version, "dtype": "float32", "attention": "sdpa"}
        self._cache: Any = None
        self._ids = torch.zeros(1, 1, dtype=torch.int64)

    def prefill(self, tokens: list[int]) -> None:
        self._forward(torch.tensor([tokens]), self._new_cache())

    def begin(self, tokens: list[int], batch: int, num_steps: int) -> None:
        del num_steps  # the cache grows
        self._cache = self._new_cache()
        self._forward(torch.tensor([tokens]), self._cache)
        self._cache.batch_repeat_interleave(batch)
        self._ids = torch.tensor(tokens[:batch])[:, None]

    def step(self) -> None:
        self._ids = self._forward(self._ids, self._cache)[:, -1:].argmax(-1)

    def end(self) -> None:
        self._cache = None

    def logits(self, windows: list[list[int]], num_scored: int, path: str) -> None:
        shape = (len(windows), num_scored, self._model.config.vocab_size)
        out = np.memmap(path, np.float32, "w+", shape=shape)
        for index, window in enumerate(windows):
            ids = torch.tensor([window])
            out[index] = self._forward(ids, self._new_cache(), num_scored)[0].numpy()

    def _new_cache(self) -> Any:
        return self._transformers.DynamicCache(config=self._model.config)

    def _forward(self, ids: torch.Tensor, cache: Any, num_kept: int = 1) -> torch.Tensor:
        """Return the last positions' logits; the cache grows."""
        logits: torch.Tensor = self._model(
            ids, use_cache=True, logits_to_keep=num_kept, **{self._cache_name: cache}
        ).logits
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        serve(lambda: Transformers(args.model))


if __name__ == "__main__":
    main()

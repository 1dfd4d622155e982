"""One tiny model loaded twice, by prfaas and by transformers, from the same directory."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.sequence_kv import SequenceKv
from tests.tiny_configs import VOCAB_SIZE, Family
from tests.tiny_models import write_tiny_model

BLOCK_TOKENS = 64
NUM_TOKENS = 201
"""Three whole chunks and a part of one; more than any tiny model's window."""
auto_model: Any = transformers.AutoModelForCausalLM
logging: Any = transformers.utils.logging


def tokens_of(seed: int = 0, num_tokens: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def load(
    family: Family,
    dtype: Literal["float16", "float32"] = "float32",
) -> Model:
    with TemporaryDirectory() as directory:
        path = write_tiny_model(Path(directory), family)
        return load_model(path, dtype=dtype)


def reference_logits(family: Family, tokens: Sequence[int]) -> Tensor:
    """Return transformers' float32 logits after every token, [T, V], of one pass over all.

    Not cached continuation, which is wrong in some of its families (models.md §5).
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with TemporaryDirectory() as directory, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that fast kernels are not installed
        path = write_tiny_model(Path(directory), family)
        model, report = auto_model.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        missing = {name for name in report["missing_keys"] if not is_computed(name)}
        assert (missing, report["unexpected_keys"], report["mismatched_keys"]) == (
            set(),
            set(),
            set(),
        )
        logits: Tensor = model.eval()(
            input_ids=torch.tensor([list(tokens)]), use_cache=False
        ).logits
    logging.set_verbosity(verbosity)
    return logits[0].float()


def is_computed(name: str) -> bool:
    """Whether transformers fills the tensor itself: lightning attention's tables of decay."""
    return name.rpartition(".")[2] in {"slope_rate", "query_decay", "key_decay", "diagonal_decay"}


class Run:
    """One sequence of a model, forward by forward."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.kv = model.new_kv(capacity_tokens=2 * NUM_TOKENS, block_tokens=BLOCK_TOKENS)

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after the last token, [V]."""
        segment = Segment(kv=self.kv, tokens=tokens, num_logits=1)
        return self.model.forward([segment])[0]

    def pieces(self, tokens: Sequence[int], cuts: Sequence[int]) -> Tensor:
        """Return the logits after each piece, [pieces, V]."""
        bounds = [0, *cuts, len(tokens)]
        return torch.stack([self.forward(tokens[a:b]) for a, b in pairwise(bounds)])

    def greedy(self, first: Tensor, num_steps: int) -> tuple[list[int], Tensor]:
        """Return the tokens drawn from `first` on, and the logits after each, [steps, V]."""
        drawn, rows = [int(first.argmax())], []
        for _ in range(num_steps):
            rows.append(self.forward(drawn[-1:]))
            drawn.append(int(rows[-1].argmax()))
        return drawn[:-1], torch.stack(rows)


def pages_of(kv: SequenceKv) -> dict[tuple[int, int], bytes]:
    """Return all that goes on elsewhere needs: (layer, block) -> K and V; (layer, -1) -> state."""
    pages: dict[tuple[int, int], bytes] = {}
    num_tokens = kv.num_tokens
    for layer, layer_kv in enumerate(kv.layers):
        if layer_kv is not None:
            spec = layer_kv.spec
            first = (num_tokens - spec.kept_tokens(num_tokens)) // BLOCK_TOKENS
            for block in range(first, -(-num_tokens // BLOCK_TOKENS)):
                count = min(BLOCK_TOKENS, num_tokens - block * BLOCK_TOKENS)
                page = bytearray(count * spec.values_per_token * 4)
                kv.export_block(layer, block, count, memoryview(page))
                pages[layer, block] = bytes(page)
        if (state := kv.states[layer]) is not None:
            data = bytearray(state.nbytes)
            state.write_to(num_tokens, memoryview(data), 0)
            pages[layer, -1] = bytes(data)
    return pages


def import_pages(kv: SequenceKv, pages: dict[tuple[int, int], bytes], num_tokens: int) -> None:
    """Take what pages_of gave; a state in three slices, the last first."""
    for (layer, block), page in pages.items():
        if block >= 0:
            count = min(BLOCK_TOKENS, num_tokens - block * BLOCK_TOKENS)
            kv.import_block(layer, block, count, memoryview(page))
            continue
        size = -(-len(page) // 3)
        for start in (2 * size, 0, size):
            part = memoryview(page)[start : start + size]
            kv.state_of(layer).read_from(num_tokens, part, start)
    kv.set_num_tokens(num_tokens)

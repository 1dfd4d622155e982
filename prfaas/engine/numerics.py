"""Exactness, tested at start on the very weights and kernels in use, and named in a fingerprint.

Two nodes whose fingerprints are equal compute the same bits for the same tokens, however the tokens
were cut into chunks and batches.
"""

import hashlib
import platform
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from prfaas.engine.attention import KEY_BLOCK, attend
from prfaas.engine.batch import Batch, Segment
from prfaas.engine.config import LayerSpec
from prfaas.engine.linear import ROW_MULTIPLE, Packing, is_available
from prfaas.engine.model import Model

NUM_TEST_TOKENS = 330
TEST_CUTS = (1, 2, 9, 70, 71, 200, 264)
"""Ends of the pieces that must give the bits of the whole: single rows, odd counts, whole tiles."""
NUM_NEIGHBOUR_TOKENS = 3
NUM_TEST_KEYS = 1100
NUM_TEST_ROWS = 20
HEAD_ROWS = 4


class InexactKernelsError(Exception):
    """The self-test found a row that depends on the rows beside it."""


def candidate_packings(dtype: Literal["float16", "float32"]) -> tuple[Packing, ...]:
    """Return the packings to try for `dtype`, best first: those this machine computes at all.

    The slower ones keep the weights in float32.
    """
    ranked: tuple[Packing, ...] = ("fbgemm-fp16", "onednn-f32", "padded-f32")
    wanted = ranked if dtype == "float16" else ranked[1:]
    return tuple(packing for packing in wanted if is_available(packing))


def numerics_fingerprint(model: Model) -> str:
    """Return what decides the bits of this model's results here, after testing that they are exact.

    Raises:
        InexactKernelsError: some result depends on how the work was cut.
    """
    return " ".join(
        (
            f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}",
            f"torch-{torch.__version__}",
            f"{model.packing}-rows{ROW_MULTIPLE[model.packing]}",
            f"attention-grid{KEY_BLOCK}",
            "kv-float32",
            "exact",
            f"test-{self_test(model)[:16]}",
        )
    )


@torch.no_grad()
def self_test(model: Model) -> str:
    """Run one layer of each kind, long attention and the head whole and in pieces.

    Returns:
        The sha256 of all results. It does not depend on the number of threads.

    Raises:
        InexactKernelsError: naming the part whose bits differ.
    """
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    first_of_kind = {spec: index for index, spec in reversed(list(enumerate(model.config.layers)))}
    for spec, index in first_of_kind.items():
        x_TD = torch.randn(NUM_TEST_TOKENS, model.config.hidden_size, generator=generator)
        whole_TD = _run_layer(model, index, x_TD, ())
        _require_equal(f"layer {index}", whole_TD, _run_layer(model, index, x_TD, TEST_CUTS))
        digest.update(whole_TD.numpy().data)
        digest.update(_test_attention(spec, generator).contiguous().numpy().data)
    rows = ROW_MULTIPLE[model.packing]
    x_TD = torch.randn(HEAD_ROWS * rows, model.config.hidden_size, generator=generator)
    whole_TV = model.lm_head(x_TD)
    pieces_TV = torch.cat([model.lm_head(x_TD[:rows]), model.lm_head(x_TD[rows:])])
    _require_equal("the head", whole_TV, pieces_TV)
    digest.update(whole_TV.numpy().data)
    return digest.hexdigest()


def _run_layer(model: Model, index: int, x_TD: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """Return one layer's output rows, computed in pieces, each beside another sequence's rows."""
    kv = model.new_kv(capacity_tokens=len(x_TD))
    rows = []
    for start, stop in pairwise((0, *cuts, len(x_TD))):
        neighbour = model.new_kv(capacity_tokens=NUM_NEIGHBOUR_TOKENS)
        segments = [
            Segment(kv=kv, tokens=[0] * (stop - start), num_logits=0),
            Segment(kv=neighbour, tokens=[0] * NUM_NEIGHBOUR_TOKENS, num_logits=0),
        ]
        batch = Batch(segments, ROW_MULTIPLE[model.packing])
        piece_TD = x_TD.new_ones(len(batch.tokens_T), x_TD.shape[1])
        piece_TD[: stop - start] = x_TD[start:stop]
        model.layers[index].add_to(piece_TD, batch, index, _ignore)
        rows.append(piece_TD[: stop - start])
        kv.num_tokens = stop
    return torch.cat(rows)


def _ignore() -> None:
    """Nobody waits for the test's K and V."""


def _test_attention(spec: LayerSpec, generator: torch.Generator) -> Tensor:
    """Return the last rows of a longer attention, equal for a tile, single rows and a cut buffer."""
    num_groups = spec.num_heads // spec.num_kv_heads
    shape = (spec.num_kv_heads, NUM_TEST_KEYS, num_groups, spec.head_dim)
    q_HTGK = torch.randn(shape, generator=generator)
    padded = -(-NUM_TEST_KEYS // KEY_BLOCK) * KEY_BLOCK
    kv_2HCK = torch.randn(2, spec.num_kv_heads, padded, spec.head_dim, generator=generator)

    def rows(start: int, stop: int, first_key: int = 0) -> Tensor:
        return attend(
            q_HTGK[:, start:stop].flatten(1, 2),
            *kv_2HCK[:, :, first_key:],
            num_groups=num_groups,
            first_position=start,
            first_key=first_key,
            scale=spec.scale,
            window_tokens=spec.window_tokens,
        )

    start = NUM_TEST_KEYS - NUM_TEST_ROWS
    whole_HRK = rows(start, NUM_TEST_KEYS)
    window = spec.window_tokens or NUM_TEST_KEYS
    first_key = max(0, start - window + 1) // KEY_BLOCK * KEY_BLOCK
    single = [rows(position, position + 1, first_key) for position in range(start, NUM_TEST_KEYS)]
    _require_equal(f"attention of window {spec.window_tokens}", whole_HRK, torch.cat(single, 1))
    return whole_HRK


def _require_equal(name: str, whole: Tensor, pieces: Tensor) -> None:
    if not torch.equal(whole, pieces):
        differing = int((whole != pieces).sum())
        raise InexactKernelsError(f"{name}: {differing} of {whole.numel()} values differ")

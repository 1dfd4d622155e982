"""Exactness, tested at start on the very weights and kernels in use, and named in a fingerprint.

Two nodes whose fingerprints are equal and say "exact" compute the same bits for the same tokens,
however the tokens were cut into chunks and batches, and whatever their CPUs: the kernels' source says
which bits (`native/code.py`), and a fingerprint has a hash of what they gave here, for inputs that are
the same everywhere. Kernels that promise no such thing are tested for a bound, and their fingerprint
names the device and libraries, and says that rows depend on the batch.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from prfaas.engine.attention import Queries, attend
from prfaas.engine.batch import Batch, Rows, Segment
from prfaas.engine.device import device_names
from prfaas.engine.kv import CPU, AttentionSpec, attention_of, buffer_shapes, span_of
from prfaas.engine.linear import Packing
from prfaas.engine.mixer_spec import GqaSpec, LightningSpec, MixerSpec, MlaSpec, ParallelSpec
from prfaas.engine.model import Model
from prfaas.engine.model_spec import Activation
from prfaas.engine.native.activations import gated
from prfaas.engine.native.attention_unit import KEY_BLOCK
from prfaas.engine.options import WeightDtype
from prfaas.engine.probe import Probe, all_sizes
from prfaas.engine.rope import turns_of
from prfaas.engine.rope_spec import RopeSpec
from prfaas.errors import ConfigError
from prfaas.log import get_logger

NUM_TEST_TOKENS = 330
TEST_CUTS = (1, 2, 4, 9, 70, 71, 200, 264)
"""Ends of the pieces that must give the bits of the whole: single rows, odd counts, whole tiles."""
NUM_NEIGHBOUR_TOKENS = 2
NUM_TEST_KEYS = 1100
NUM_TEST_ROWS = 20
TEST_POSITIONS = np.concatenate([np.arange(64), 2 ** np.arange(6, 21) - 1, 2 ** np.arange(6, 21)])
NUM_TEST_IDS = 64
HASH_DIGITS = 32
ODD_WIDTH = 95
"""Of rows that end in the midst of any vector; all_sizes() fills 90 of them."""
HEAD_ROWS = (12, 1, 2, 4)
"""Rows of the head's pieces."""
SELF_TEST_BOUNDS: dict[Packing, float] = {"torch-bf16": 0.05, "torch-f32": 1e-3}
"""Of kernels that are not exact: how far BOUNDED_FRACTION of the self-test's rows, computed in pieces,
may be from the whole, as the norm of the difference over the norm."""
BOUNDED_FRACTION = 0.75
"""The other rows may be anywhere: rounding alone sends a few tokens to other experts. What is wrong (a
mask, a state, a position) is wrong for most rows, and by as much as there is."""


class InexactKernelsError(Exception):
    """The self-test found a row that depends on the rows beside it, beyond what is allowed."""


def packing_of(dtype: WeightDtype, device: torch.device = CPU) -> Packing:
    """Return how weights of this dtype are packed on the device.

    Raises:
        ConfigError: the device has no packing of this dtype.
    """
    if device.type != "cpu":
        if dtype == "float16":
            raise ConfigError("engine.dtype = float16 is for a CPU; CUDA takes bfloat16 or float32")
        return "torch-f32" if dtype == "float32" else "torch-bf16"
    if dtype == "bfloat16":
        raise ConfigError("engine.dtype = bfloat16 is for CUDA; a CPU takes float16 or float32")
    return "fma-f32" if dtype == "float32" else "fma-fp16"


def numerics_fingerprint(model: Model) -> str:
    """Return what decides the bits of this model's results here, after testing them.

    A greedy head whose logits are not the head's is taken from the model, with a warning.

    Raises:
        InexactKernelsError: some result depends on how the work was cut, by more than it may.
    """
    device, kv = device_names(model.device), f"kv-{model.kv_dtype}"
    _choose_greedy_head(model)
    test = self_test(model)
    if not model.is_exact:
        return " ".join((*device, model.packing, "attention-torch", kv, exactness(model)))
    model.choose_recordings()
    attention, results = f"attention-joined{KEY_BLOCK}", f"test-{test[:HASH_DIGITS]}"
    # Neither kind nor libraries of the CPU: that they make no difference is what the test's hash says.
    return " ".join((model.device.type, model.packing, attention, kv, exactness(model), results))


@torch.no_grad()
def _choose_greedy_head(model: Model) -> None:
    greedy = model.greedy_head
    if greedy is None:
        return
    probe = Probe()
    for num_rows in HEAD_ROWS:
        x_TD = probe.normal(num_rows, model.config.hidden_size)
        if not greedy.agrees_with(x_TD, model.lm_head(x_TD)):
            get_logger().warning("greedy_head.inexact")
            model.greedy_head = None
            return


def exactness(model: Model) -> str:
    """Return what the bits of a row depend on besides the tokens before it.

    "exact": nothing. "rows-depend-on-batch": on the rows that were computed with it.
    """
    return "exact" if model.is_exact else "rows-depend-on-batch"


@torch.no_grad()
def self_test(model: Model) -> str:
    """Run one layer of each kind, long attention and the head whole and in pieces.

    Of an exact model the functions that layers are made of are run over their whole range, too.

    Returns:
        The sha256 of all results. It does not depend on the number of threads, nor, if exact, on
        the machine.

    Raises:
        InexactKernelsError: naming the part whose bits differ, or which is out of SELF_TEST_BOUNDS.
    """
    probe = Probe()
    digest = hashlib.sha256()
    for index in _first_of_each_kind(model):
        x_TD = probe.rows(NUM_TEST_TOKENS, model.config.hidden_size)
        rows_TD = _test_layer(model, index, x_TD.to(model.device))
        digest.update(rows_TD.cpu().numpy().data)
        attention = attention_of(model.config.layers[index])
        if attention is not None and model.is_exact:
            digest.update(long_attention(attention, probe).numpy().data)
    if model.is_exact:
        for result in _functions(model):
            digest.update(result.contiguous().numpy().data)
    x_TD = model.norm(probe.rows(sum(HEAD_ROWS), model.config.hidden_size).to(model.device))
    whole_TV = model.lm_head(x_TD)
    pieces_TV = torch.cat(
        [model.lm_head(piece_TD) for piece_TD in torch.split(x_TD, list(HEAD_ROWS))]
    )
    _require_alike("the head", whole_TV, pieces_TV, model)
    digest.update(whole_TV.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def _functions(model: Model) -> Iterator[Tensor]:
    """Yield results of what is no layer, or sees little of its range in one."""
    spec = model.config
    yield activation_everywhere(spec.activation)
    for index in _first_of_each_kind(model):
        if (turns_PK := _turns_everywhere(spec.layers[index])) is not None:
            yield turns_PK
    ids = np.arange(NUM_TEST_IDS) * (spec.vocab_size - 1) // (NUM_TEST_IDS - 1)
    yield model.embed_tokens(torch.from_numpy(ids))


def _turns_everywhere(layer: MixerSpec) -> Tensor | None:
    """Return the layer's turns of positions up to a million; None: it has none."""
    match layer.attention if isinstance(layer, ParallelSpec) else layer:
        case GqaSpec(rope=RopeSpec() as rope, head_dim=width):
            pass
        case LightningSpec(rope=RopeSpec() as rope, head_dim=width):
            pass
        case MlaSpec(rope=RopeSpec() as rope, rope_dim=width):
            pass
        case _:
            return None
    return torch.view_as_real(turns_of(rope, width, TEST_POSITIONS))


def activation_everywhere(name: Activation) -> Tensor:
    """Return a gated feed-forward's activation, and so the exponential, of gates of all sizes."""
    gates_TF = all_sizes().view(-1, ODD_WIDTH)
    return gated(name, torch.cat([gates_TF, torch.ones_like(gates_TF)], dim=1))


def _first_of_each_kind(model: Model) -> list[int]:
    """Return the first layer of each pair of a mixer and a feed-forward."""
    spec = model.config
    kinds: dict[object, int] = {}
    for index, pair in enumerate(zip(spec.layers, spec.ffns, strict=True)):
        mixer, ffn = pair
        if isinstance(mixer, LightningSpec):
            mixer = replace(mixer, slope_scale=1.0)  # it alone differs from layer to layer
        kinds.setdefault((mixer, ffn), index)
    return list(kinds.values())


def _test_layer(model: Model, index: int, x_TD: Tensor) -> Tensor:
    """Return the layer's output rows; raises InexactKernelsError."""
    whole_TD = _run_layer(model, index, x_TD, ())
    pieces_TD = _run_layer(model, index, x_TD, TEST_CUTS)
    _require_alike(f"layer {index}", whole_TD, pieces_TD, model)
    return whole_TD


def _run_layer(model: Model, index: int, x_TD: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """Return one layer's output rows, computed in pieces.

    Each is beside another sequence's rows, which stand behind it and before it in turn.
    """
    kv = model.new_kv(capacity_tokens=len(x_TD))
    rows = []
    for number, (start, stop) in enumerate(pairwise((0, *cuts, len(x_TD)))):
        neighbour = model.new_kv(capacity_tokens=NUM_NEIGHBOUR_TOKENS)
        tokens, others = [0] * (stop - start), [0] * NUM_NEIGHBOUR_TOKENS
        segments = [
            Segment(kv=kv, tokens=tokens, num_logits=0),
            Segment(kv=neighbour, tokens=others, num_logits=0),
        ]
        first = 0
        if number % 2:
            segments.reverse()
            first = NUM_NEIGHBOUR_TOKENS
        own = slice(first, first + stop - start)
        for segment in segments:
            if (state := segment.kv.states[index]) is not None:
                state.begin(segment.kv.num_tokens, ())
        batch = Batch(segments, model.device)
        piece_TD = x_TD.new_ones(len(batch.tokens_T), x_TD.shape[1])
        piece_TD[own] = x_TD[start:stop]
        model.layers[index].add_to(piece_TD, Rows(batch), index)
        rows.append(piece_TD[own])
        kv.num_tokens = stop
    return torch.cat(rows)


@torch.no_grad()
def long_attention(spec: AttentionSpec, probe: Probe) -> Tensor:
    """Return the last rows of a longer sequence than a layer's test has.

    They must be equal as a chunk and as steps, which see no more than they need.

    Raises:
        InexactKernelsError: they are not.
    """
    buffers = [
        probe.normal(num_heads, NUM_TEST_KEYS, width) for num_heads, width in buffer_shapes(spec)
    ]
    num_heads, _, key_dim = buffers[0].shape
    by_group = (num_heads, spec.num_heads // num_heads)
    q_THGK = probe.normal(NUM_TEST_ROWS, *by_group, key_dim)
    has_sinks = isinstance(spec, GqaSpec) and spec.has_sinks
    sinks_HG = probe.normal(*by_group) if has_sinks else None
    start = NUM_TEST_KEYS - NUM_TEST_ROWS

    def run(queries: list[Queries]) -> Tensor:
        out_THGV = q_THGK.new_zeros(*q_THGK.shape[:3], queries[0].span.values.shape[2])
        attend(
            q_THGK,
            queries,
            scale=spec.scale,
            window_tokens=spec.window_tokens,
            out_THGV=out_THGV,
            sinks_HG=sinks_HG,
        )
        return out_THGV

    whole = run([Queries(span_of(spec, buffers, 0), start, 0, NUM_TEST_ROWS)])
    first_key = max(0, start + 1 - (spec.window_tokens or NUM_TEST_KEYS))
    steps = []
    for row in range(NUM_TEST_ROWS):
        seen = [buffer_HCK[:, first_key : start + row + 1] for buffer_HCK in buffers]
        steps.append(Queries(span_of(spec, seen, first_key), start + row, row, 1))
    name = f"attention of window {spec.window_tokens}"
    _require_equal(name, whole, run(steps))
    for row, step in enumerate(steps):
        _require_equal(f"{name}, alone", whole[row], run([step])[row])
    return whole


def _require_alike(name: str, whole: Tensor, pieces: Tensor, model: Model) -> None:
    """Raise InexactKernelsError unless the bits are equal, or the bound of the packing is kept."""
    if not whole.isfinite().all():
        raise InexactKernelsError(f"{name}: results that are not finite; are the weights?")
    if model.is_exact:
        _require_equal(name, whole, pieces)
        return
    bound = SELF_TEST_BOUNDS[model.packing]
    differences = (whole - pieces).norm(dim=1) / whole.norm(dim=1)
    difference = float(differences.quantile(BOUNDED_FRACTION))
    if not difference <= bound:  # nan is none
        raise InexactKernelsError(f"{name}: rows differ by {difference:.2g}, more than {bound}")


def _require_equal(name: str, whole: Tensor, pieces: Tensor) -> None:
    if not torch.equal(whole, pieces):
        differing = int((whole != pieces).sum())
        raise InexactKernelsError(f"{name}: {differing} of {whole.numel()} values differ")

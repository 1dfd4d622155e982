"""Every family by torch's own kernels, on the CPU and on CUDA, beside the exact CPU kernels."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from prfaas.cache.spec import StateSpec, bytes_of_page, needed_blocks
from prfaas.engine.device import device_names, find_device
from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.mla import MlaMixer
from prfaas.engine.layers.parallel import ParallelMixer
from prfaas.engine.layers.torch_attention import TorchAttention
from prfaas.engine.loader import load_model
from prfaas.engine.model import Model, Segment
from prfaas.engine.numerics import (
    SELF_TEST_BOUNDS,
    InexactKernelsError,
    numerics_fingerprint,
    packing_of,
    self_test,
)
from prfaas.engine.options import EngineOptions
from prfaas.engine.sequence_kv import SequenceKv
from prfaas.errors import ConfigError
from tests.engine.golden import Run, load, tokens_of
from tests.engine.places import PLACES, Place, tiny_on
from tests.tiny_configs import Family

FAMILIES: tuple[Family, ...] = get_args(Family)
FEW: tuple[Family, ...] = ("gemma3", "kimi_linear", "mimo_v2_flash", "falcon_h1", "lfm2")
"""Windows, latents and KDA, sinks and experts, a layer of two groups, convolutions alone."""
BLOCK_TOKENS = 64
TOKENS = tokens_of()
CUTS = (64, 128)
NUM_STEPS = 10
TOLERANCES = {"torch-f32": 1e-4, "torch-bf16": 0.2}
"""Of the median row of logits, as the norm of the difference over the norm: bfloat16 has 8 bits, and
now and then a token goes to another expert for the last of them, which with random weights is a
row of its own."""
every_family = pytest.mark.parametrize("family", FAMILIES)
few_families = pytest.mark.parametrize("family", FEW)
every_place = pytest.mark.parametrize("place", PLACES)


@cache
def expected(family: Family) -> Tensor:
    """The exact kernels' logits after the pieces of a prompt, then of steps, [pieces + steps, V]."""
    return logits_of(load(family))


def logits_of(model: Model) -> Tensor:
    run = Run(model)
    pieces = run.pieces(TOKENS, CUTS)
    return torch.cat([pieces, *(run.forward([token])[None] for token in TOKENS[:NUM_STEPS])])


def difference(actual_TV: Tensor, wanted_TV: Tensor) -> float:
    return float(((actual_TV - wanted_TV).norm(dim=1) / wanted_TV.norm(dim=1)).median())


@every_place
@every_family
def test_logits_are_those_of_the_exact_kernels_within_the_tolerance(
    place: Place, family: Family
) -> None:
    logits = logits_of(tiny_on(place, family))
    assert (logits.dtype, logits.device.type) == (torch.float32, "cpu")
    assert difference(logits, expected(family)) < TOLERANCES[place.packing]


@every_place
@few_families
def test_all_that_a_sequence_keeps_lies_on_the_device_and_is_accounted_for(
    place: Place, family: Family
) -> None:
    model = tiny_on(place, family)
    run = Run(model)
    run.forward(TOKENS)
    for layer in run.kv.layers:
        for buffer in () if layer is None else layer.buffers:
            assert (buffer.device.type, buffer.dtype) == (place.device, layer_dtype(model))
    for state in run.kv.states:
        for tensor in () if state is None else state.at(len(TOKENS)):
            assert (tensor.device.type, tensor.dtype) == (place.device, torch.float32)
    assert run.kv.nbytes == model.kv_capacity_bytes(run.kv.capacity_tokens)


def layer_dtype(model: Model) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[model.kv_dtype]


Pages = dict[tuple[int, int, int, int], bytes]


def exported(model: Model, kv: SequenceKv) -> Pages:
    """(group, layer, block, first byte) -> bytes, of all that is needed to go on."""
    pages: Pages = {}
    for index, group in enumerate(model.layout(BLOCK_TOKENS).groups):
        for layer in group.layers:
            if isinstance(group, StateSpec):
                for start in range(0, group.state_bytes, group.page_bytes):
                    out = bytearray(min(group.page_bytes, group.state_bytes - start))
                    kv.state_of(layer).write_to(kv.num_tokens, memoryview(out), start)
                    pages[index, layer, 0, start] = bytes(out)
                continue
            for block in needed_blocks(group, kv.num_tokens, BLOCK_TOKENS):
                count = min(BLOCK_TOKENS, kv.num_tokens - block * BLOCK_TOKENS)
                out = bytearray(bytes_of_page(group, 0, count, BLOCK_TOKENS))
                kv.export_block(layer, block, count, memoryview(out))
                pages[index, layer, block, 0] = bytes(out)
    return pages


def imported(model: Model, pages: Pages) -> Run:
    run = Run(model)
    groups = model.layout(BLOCK_TOKENS).groups
    for (group, layer, block, start), page in pages.items():
        data = memoryview(bytearray(page))
        if isinstance(groups[group], StateSpec):
            run.kv.state_of(layer).read_from(len(TOKENS), data, start)
        else:
            count = min(BLOCK_TOKENS, len(TOKENS) - block * BLOCK_TOKENS)
            run.kv.import_block(layer, block, count, data)
    run.kv.set_num_tokens(len(TOKENS))
    return run


@every_place
@every_family
def test_pages_come_back_byte_for_byte_and_decode_goes_on_from_them(
    place: Place, family: Family
) -> None:
    model = tiny_on(place, family)
    here = Run(model)
    token = int(here.forward(TOKENS).argmax())
    pages = exported(model, here.kv)
    there = imported(model, pages)
    assert exported(model, there.kv) == pages
    steps = []
    for _ in range(NUM_STEPS):
        steps.append(torch.stack([here.forward([token]), there.forward([token])]))
        token = int(steps[-1][0].argmax())
    logits, others = torch.stack(steps, dim=1)
    assert difference(others, logits) < TOLERANCES[place.packing]


@every_place
@few_families
def test_a_neighbour_and_a_fork_change_little(place: Place, family: Family) -> None:
    model = tiny_on(place, family)
    alone, beside = (Run(model) for _ in range(2))
    neighbour = Run(model)
    rows = []
    for start, stop in pairwise((0, *CUTS, len(TOKENS))):
        segments = [
            Segment(kv=run.kv, tokens=tokens, num_logits=1)
            for run, tokens in ((neighbour, [5, 6]), (beside, TOKENS[start:stop]))
        ]
        rows.append(torch.stack([alone.forward(TOKENS[start:stop]), model.forward(segments)[1]]))
    fork = Run(model)
    fork.kv = beside.kv.fork()
    beside.forward([9])
    rows.append(torch.stack([alone.forward([7]), fork.forward([7])]))
    logits, others = torch.stack(rows, dim=1)
    assert difference(others, logits) < TOLERANCES[place.packing]


@every_place
@every_family
def test_the_self_test_keeps_its_bound_and_the_fingerprint_promises_nothing_more(
    place: Place, family: Family
) -> None:
    model = tiny_on(place, family)
    words = numerics_fingerprint(model).split()
    assert words[0].startswith(place.device)
    assert tuple(words) == (
        *device_names(model.device),
        place.packing,
        "attention-torch",
        f"kv-{model.kv_dtype}",
        "rows-depend-on-batch",
    )
    assert not model.is_exact


@every_place
@pytest.mark.parametrize("family", ["gemma3", "kimi_linear"])
def test_attention_that_depends_on_the_cut_breaks_the_bound(
    place: Place, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sees_all(self, seen, position, num_tokens):
        return torch.ones(num_tokens, seen.keys.shape[1], dtype=torch.bool, device=place.device)

    monkeypatch.setattr(TorchAttention, "_mask", sees_all)
    with pytest.raises(InexactKernelsError, match=str(SELF_TEST_BOUNDS[place.packing])):
        self_test(tiny_on(place, family))


@every_place
def test_results_that_are_no_numbers_are_no_match(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_on(place, "llama")
    head = model.lm_head
    monkeypatch.setattr(model, "lm_head", lambda x_MK: head(x_MK).mul_(float("nan")))
    with pytest.raises(InexactKernelsError, match="the head: results that are not finite"):
        self_test(model)


@every_place
@few_families
def test_attention_is_torchs_own(place: Place, family: Family) -> None:
    mixers = [layer.mixer for layer in tiny_on(place, family).layers]
    parts = [mixer.attention if isinstance(mixer, ParallelMixer) else mixer for mixer in mixers]
    found = [part.attend for part in parts if isinstance(part, GqaMixer | MlaMixer)]
    assert found
    assert all(isinstance(attend, TorchAttention) for attend in found)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cuda:1234"])
def test_a_device_that_means_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.device = '{name}'.*cpu, cuda or cuda:N"):
        find_device(name)


def test_a_device_that_is_not_there_is_refused_with_the_number_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"'cuda:2'.* finds 2 CUDA devices"):
        find_device("cuda:2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'cuda'.* finds 0 CUDA devices"):
        find_device("cuda")


def test_a_model_that_cannot_be_put_there_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "no model"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda:1'"):
        load_model(nowhere, device="cuda:1")
    with pytest.raises(ConfigError, match="float16 is for a CPU"):
        load_model(nowhere, device="cuda")


def test_a_dtype_belongs_to_a_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert packing_of("bfloat16", cuda) == "torch-bf16"
    assert packing_of("float32", cuda) == "torch-f32"
    with pytest.raises(ConfigError, match="float16 is for a CPU"):
        packing_of("float16", cuda)
    with pytest.raises(ConfigError, match="bfloat16 is for CUDA"):
        packing_of("bfloat16", cpu)
    assert EngineOptions().weight_dtype == "float16"
    assert EngineOptions(device="cuda").weight_dtype == "bfloat16"
    assert EngineOptions(device="cuda:1", dtype="float32").weight_dtype == "float32"

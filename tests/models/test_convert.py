import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer as Encoding
from tokenizers import models

from prfaas.engine.gguf import read_gguf
from prfaas.errors import ConfigError
from prfaas.models.convert import convert_gguf, with_spaced_merges
from prfaas.models.manifest import read_manifest
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer
from tests.models.tiny_gguf import TEMPLATE, write_tiny_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert_gguf(source, directory)
    return directory


def test_every_weight_keeps_its_bits(source: Path, converted: Path) -> None:
    expected = dict(read_gguf(source).tensors)
    with safe_open(converted / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(expected)
        for name, array in expected.items():
            stored = file.get_tensor(name).float().numpy()
            assert np.array_equal(stored.view(np.uint32), array.view(np.uint32))


def test_half_precision_stays_half_and_quantised_becomes_single(converted: Path) -> None:
    with safe_open(converted / "model.safetensors", framework="pt") as file:
        assert str(file.get_tensor("model.layers.0.mlp.up_proj.weight").dtype) == "torch.float16"
        assert str(file.get_tensor("model.embed_tokens.weight").dtype) == "torch.float32"


def test_tokenizer_template_and_config_are_beside_the_weights(
    source: Path, converted: Path
) -> None:
    tokenizer = Tokenizer.load(converted)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (0, 2))
    assert tokenizer.decode(tokenizer.encode("naïve 😀", add_bos=True)) == "naïve 😀"
    assert (converted / "chat_template.jinja").read_text() == TEMPLATE
    assert ChatTemplate.load(converted).render([{"role": "user", "content": "x"}]) == "user: x\n"
    config = json.loads((converted / "config.json").read_text())
    assert config == read_gguf(source).config


@pytest.mark.parametrize(
    ("merges", "is_spaced"), [([("a", "b"), ("ab", "c")], True), ([("a", "b"), ("ab", " ")], False)]
)
def test_merges_are_stored_as_strings_unless_a_token_holds_a_space(
    merges: list[tuple[str, str]], is_spaced: bool
) -> None:
    tokens = ["a", "b", "c", " ", "ab", "ab ", "abc"]
    vocab = {token: index for index, token in enumerate(tokens)}
    before = Encoding(models.BPE(vocab=vocab, merges=merges))
    stored = with_spaced_merges(json.loads(before.to_str()))
    assert all(isinstance(merge, str) for merge in stored["model"]["merges"]) == is_spaced
    after = Encoding.from_str(json.dumps(stored))
    for text in ("abc", "ab c", "cab  ab"):
        assert after.encode(text).ids == before.encode(text).ids


def test_the_identity_is_of_the_weights_alone(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    first = read_manifest(converted)
    assert first is not None
    for name, seed in (("again", 0), ("other", 1)):
        path = write_tiny_gguf(tmp_path / f"{name}.gguf", seed=seed)
        (tmp_path / name).mkdir()
        manifest = convert_gguf(path, tmp_path / name)
        assert (manifest.model_fingerprint == first.model_fingerprint) == (seed == 0)
        assert read_manifest(tmp_path / name) == manifest


def test_progress_covers_all_bytes(source: Path, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    convert_gguf(source, tmp_path, note)
    assert list(seen) == ["Building the tokenizer", "Converting the weights"]
    for steps in seen.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "inf.gguf", scale=1e5)
    with pytest.raises(ConfigError, match=r"mlp.*not finite"):
        convert_gguf(path, tmp_path)


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 8),
        (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 1),
        (writer.add_vocab_size, 8),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="one of 3 parts"):
        convert_gguf(path, tmp_path)

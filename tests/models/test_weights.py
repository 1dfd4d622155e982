import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from prfaas.errors import ConfigError
from prfaas.models.weights import identify_weights, narrow, write_weights

Float32 = NDArray[np.float32]
floats = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=1, max_dims=3, max_side=5),
    elements=st.floats(width=32) | st.floats(width=16),
)


def ignore(_done: int) -> None:
    """Take progress and show none."""


def widen(dtype: str, array: NDArray[np.generic]) -> Float32:
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


@given(floats)
def test_stored_values_give_back_the_same_bits(array: Float32) -> None:
    dtype, stored = narrow(array)
    wide = widen(dtype, stored)
    assert stored.shape == array.shape
    assert np.array_equal(wide.view(np.uint32), array.view(np.uint32))


def test_the_narrowest_form_is_taken() -> None:
    exact = np.array([1.0, -0.5, 3.0e38], dtype=np.float32)
    exact = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert narrow(exact)[0] == "BF16"
    assert narrow(np.array([1.0009765625], dtype=np.float32))[0] == "F16"
    assert narrow(np.array([1.0, 0.1], dtype=np.float32))[0] == "F32"
    assert narrow(np.array([0.1], dtype=np.float16))[0] == "F16"
    late = np.zeros(10_000, dtype=np.float32)
    late[-1] = 0.1
    assert narrow(late)[0] == "F32"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1, max_size=8), floats, max_size=5))
def test_the_file_is_read_by_safetensors(tmp_path: Path, tensors: dict[str, Float32]) -> None:
    tensors.pop("__metadata__", None)
    path = tmp_path / "model.safetensors"
    path.unlink(missing_ok=True)
    seen: list[int] = []
    write_weights(iter(tensors.items()), path, seen.append)
    assert seen == list(np.cumsum([array.size * 4 for array in tensors.values()], dtype=int))
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, array in tensors.items():
            read = file.get_tensor(name).float().numpy()
            assert np.array_equal(read, array, equal_nan=True)
            assert read.shape == array.shape


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=8), floats, min_size=1, max_size=5),
    st.randoms(),
)
def test_the_identity_depends_on_neither_order_nor_files(
    tmp_path: Path, tensors: dict[str, Float32], rng: object
) -> None:
    path, again = tmp_path / "model.safetensors", tmp_path / "again.safetensors"
    for each in (path, again):
        each.unlink(missing_ok=True)
    written = write_weights(tensors.items(), path, ignore)
    assert write_weights(reversed(tensors.items()), again, ignore) == written
    assert identify_weights([path], ignore) == written
    parts = []
    for index, item in enumerate(tensors.items()):
        part = tmp_path / f"part{index}.safetensors"
        part.unlink(missing_ok=True)
        write_weights([item], part, ignore)
        parts.append(part)
    assert identify_weights(parts, ignore) == written


def test_the_identity_changes_with_a_bit_a_name_and_a_shape(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32) / 7
    other = array.copy()
    other.view(np.uint32)[3] ^= 1
    variants = {
        "same": {"a": array},
        "bit": {"a": other},
        "name": {"b": array},
        "shape": {"a": array.reshape(2, 3)},
        "more": {"a": array, "b": array},
    }
    found = {
        write_weights(tensors.items(), tmp_path / name, ignore)
        for name, tensors in variants.items()
    }
    assert len(found) == len(variants)


def test_files_of_other_writers_are_identified(tmp_path: Path) -> None:
    tensors = {"a": np.full((2, 3), 0.1, np.float32), "b": np.full(5, 0.2, np.float32)}
    save_file(tensors, tmp_path / "theirs.safetensors")
    ours = write_weights(tensors.items(), tmp_path / "ours.safetensors", ignore)
    assert identify_weights([tmp_path / "theirs.safetensors"], ignore) == ours


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    array = np.zeros(1, np.float32)
    with pytest.raises(ConfigError, match="'a'"):
        write_weights([("a", array), ("a", array)], tmp_path / "w", ignore)


def header(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234",
        struct.pack("<Q", 2**63) + b"{}",
        header([]),
        header({"a": {}}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-90, -4]}}),
        header({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 0]}}),
        header({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 0]}}),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_a_damaged_file_is_a_config_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"damaged\.safetensors"):
        identify_weights([path], ignore)

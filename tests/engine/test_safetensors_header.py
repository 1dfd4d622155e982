"""A safetensors header that does not fit its file, or itself, is refused before anything is read."""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.safetensors_header import stored_tensors
from prfaas.errors import ConfigError

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def read(path: Path, header: str, num_bytes: int = 32) -> list[str]:
    data = header.encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(num_bytes))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return [tensor.name for tensor in stored_tensors(mapped, path)]


def test_tensors_come_in_the_headers_order_whatever_their_place(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "b": B, "a": A})
    assert read(tmp_path / "x", header) == ["b", "a"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data_offsets": [0, 20]}, "'a' of F32 .* has 20 bytes"),
        ({"data_offsets": [0, 0]}, "'a' of F32 .* has 0 bytes"),
        ({"dtype": "F16"}, "'a' of F16 .* has 24 bytes"),
        ({"dtype": "F8_E4M3"}, "'a' of F8_E4M3 .* has 24 bytes"),
        ({"shape": [-2, -3]}, r"'a' of F32 \[-2, -3\]"),
        ({"data_offsets": [4, 28]}, "'a' and 'b' share bytes"),
        ({"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}, "'a' and 'b' share bytes"),
        ({"data_offsets": [32, 56]}, "'a' lies outside"),
        ({"data_offsets": [24, 0]}, "'a' of F32 .* has -24 bytes"),
        ({"shape": "two"}, "'a' has shape 'two'"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path / "x", json.dumps({"a": A | change, "b": B}))


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 bytes follow its last tensor"):
        read(tmp_path / "x", json.dumps({"a": A, "b": B}), num_bytes=35)


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    header = f'{{"a": {json.dumps(A)}, "a": {json.dumps(B)}}}'
    with pytest.raises(ConfigError, match="twice"):
        read(tmp_path / "x", header)

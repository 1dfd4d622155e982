from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.engine.gguf_header import read_header
from prfaas.errors import ConfigError
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_the_header_is_what_the_gguf_library_reads(path: Path) -> None:
    header = read_header(path)
    reader = gguf.GGUFReader(path)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.metadata == fields
    assert [
        (tensor.name, tensor.ggml_type, tensor.offset_bytes, tensor.num_bytes)
        for tensor in header.tensors
    ] == [
        (tensor.name, tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        for tensor in reader.tensors
    ]
    assert [tensor.shape for tensor in header.tensors] == [
        tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors
    ]


def test_values_of_every_type_come_back(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("b", True)
    writer.add_string("s", "é\n")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.ones((3, 5), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    expected = {"u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000}
    expected |= {"i32": -2_000_000_000, "u64": 2**63, "i64": -(2**62)}
    assert header.metadata.items() >= expected.items()
    assert header.metadata["f32"] == 0.5
    assert header.metadata["f64"] == 0.1
    assert header.metadata["b"] is True
    assert header.metadata["s"] == "é\n"
    assert header.metadata["numbers"] == [1, 2, 3]
    assert header.metadata["texts"] == ["a", "", "ü"]
    (tensor,) = header.tensors
    assert tensor.shape == (3, 5)
    assert tensor.offset_bytes % 64 == 0
    data = path.read_bytes()[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
    assert np.array_equal(np.frombuffer(data, dtype=np.float32), np.ones(15))


def test_a_file_cut_short_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 23, 24, 100, 5000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_header(cut)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2000), st.integers(0, 255), st.integers(1, 8))
def test_any_damage_is_a_header_or_a_config_error(
    path: Path, tmp_path: Path, position: int, value: int, count: int
) -> None:
    data = bytearray(path.read_bytes())
    data[position : position + count] = bytes([value]) * count
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    try:
        tensors = read_header(damaged).tensors
    except ConfigError:
        tensors = ()
    assert all(tensor.offset_bytes + tensor.num_bytes <= len(data) for tensor in tensors)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            read_header(path)


def test_another_format_and_an_old_version_are_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="letters GGUF"):
        read_header(other)
    other.write_bytes(b"GGUF\x01\x00\x00\x00" + path.read_bytes()[8:])
    with pytest.raises(ConfigError, match="version 1"):
        read_header(other)

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import SafetensorsIndex
from headrace.checkpoint.safetensors_file import DTYPE_BITS
from headrace.errors import CheckpointError, UnsupportedModelError


def file_bytes(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def save(folder: Path, name: str, **tensors: bytes) -> None:
    header, body = {}, b""
    for key, data in tensors.items():
        header[key] = entry(len(body), len(body) + len(data), [len(data)])
        body += data
    (folder / name).write_bytes(file_bytes(header, body))


def save_sharded(folder: Path) -> None:
    save(folder, "model-00001-of-00002.safetensors", a=b"1234", b=b"56")
    save(folder, "model-00002-of-00002.safetensors", c=b"789")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    weight_map["c"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    arrays = {
        "wide": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
        "half": numpy.ones((2, 5), numpy.float16),
        "none": numpy.zeros((0, 3), numpy.float32),
        "scalar": numpy.array(7, numpy.int64),
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = SafetensorsIndex.open(tmp_path)
    assert set(index.entries) == set(arrays)
    for name, array in arrays.items():
        found = index.entries[name]
        assert found.shape == array.shape
        assert found.end - found.begin == array.nbytes
        assert (tmp_path / "model.safetensors").read_bytes()[found.begin : found.end] == array.tobytes()
    assert index.entries["wide"].dtype == "F32"


def test_dtype_sizes_agree_with_the_safetensors_package() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import _TYPES

    for name, dtype in _TYPES.items():
        if name in DTYPE_BITS and name not in ("F4", "F6_E2M3", "F6_E3M2"):
            assert DTYPE_BITS[name] == torch.empty((), dtype=dtype).element_size() * 8, name


def test_shards(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    index = SafetensorsIndex.open(tmp_path)
    b, c = index.entries["b"], index.entries["c"]
    assert b.file.read_bytes()[b.begin : b.end] == b"56"
    assert c.file.read_bytes()[c.begin : c.end] == b"789"
    assert c.file.name == "model-00002-of-00002.safetensors"


def test_files_without_an_index_are_all_read(tmp_path: Path) -> None:
    save(tmp_path, "x.safetensors", a=b"1")
    save(tmp_path, "y.safetensors", b=b"2")
    assert set(SafetensorsIndex.open(tmp_path).entries) == {"a", "b"}
    save(tmp_path, "z.safetensors", a=b"3")
    with pytest.raises(CheckpointError, match=r"z.safetensors: tensor 'a' is also in x.safetensors"):
        SafetensorsIndex.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 shards are missing on disk: model-00002-of-00002\.safetensors"
    ):
        SafetensorsIndex.open(tmp_path)


def test_a_tensor_missing_in_its_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save(tmp_path, "model-00002-of-00002.safetensors", other=b"789")
    with pytest.raises(CheckpointError, match=r"00002-of-00002.safetensors: tensor 'c' is missing, though"):
        SafetensorsIndex.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "key 'weight_map' is missing"),
        ('{"weight_map": {}}', "key 'weight_map' is missing"),
        ('{"weight_map": {"a": 3}}', "tensor 'a' is said to be in 3"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "tensor 'a' is said to be in '../x.safetensors'"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "not a .safetensors file name"),
    ],
)
def test_wrong_index_files(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsIndex.open(tmp_path)
    assert expected in str(caught.value)
    assert "model.safetensors.index.json" in str(caught.value)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no .safetensors files"):
        SafetensorsIndex.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"only pickled weights \(pytorch_model.bin\), which can run code"
    ):
        SafetensorsIndex.open(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        SafetensorsIndex.open(tmp_path / "absent")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        (file_bytes({}, length=2**40), "claims a header of 1099511627776 bytes"),
        (file_bytes({}, length=9), "claims a header of 9 bytes, but only 2"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        (file_bytes(b"{"), "the header is not JSON"),
        (file_bytes(b"\xff\xff"), "the header is not JSON"),
        (file_bytes(b"[" * 100_000), "the header is not JSON"),
        (file_bytes(b"[]"), "not a JSON object"),
        (file_bytes(b'{"a": 1, "a": 2}'), "the name 'a' is there twice"),
        (file_bytes({"__metadata__": 3}), "'__metadata__' in the header"),
        (file_bytes({"a": 3}), "tensor 'a': its header entry"),
        (file_bytes({"a": entry(0, 4, [4], "F99")}), "tensor 'a' has the unknown dtype 'F99'"),
        (file_bytes({"a": {"dtype": ["U8"]}}), "tensor 'a' has the unknown dtype ['U8']"),
        (file_bytes({"a": entry(0, 4, [-4])}), "tensor 'a' has shape [-4]"),
        (file_bytes({"a": entry(0, 4, [4.0])}), "tensor 'a' has shape [4.0]"),  # type: ignore[list-item]
        (file_bytes({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}), "tensor 'a' has shape [1]"),
        (file_bytes({"a": entry(4, 0, [4])}), "needs 4 bytes, but its data_offsets span -4"),
        (file_bytes({"a": entry(0, 4, [4], "F32")}, b"1234"), "needs 16 bytes, but its data_offsets span 4"),
        (file_bytes({"a": entry(0, 1, [3], "F4")}, b"1"), "needs 1.5 bytes"),
        (file_bytes({"a": entry(0, 4, [4])}, b"12"), "tensor 'a' ends at byte"),
        (
            file_bytes({"a": entry(0, 4, [4]), "b": entry(2, 6, [4])}, b"123456"),
            "tensors 'a' and 'b' overlap",
        ),
        (
            file_bytes({"a": entry(0, 2, [2]), "b": entry(4, 6, [2])}, b"123456"),
            "2 unused bytes before tensor 'b'",
        ),
        (file_bytes({"a": entry(0, 4, [4])}, b"12345"), "1 unused bytes after the last tensor 'a'"),
        (file_bytes({"a": entry(0, 2**61, [2**40, 2**21])}), "tensor 'a' ends at byte"),
    ],
)
def test_corruption_is_named(tmp_path: Path, data: bytes, expected: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsIndex.open(tmp_path)
    assert expected in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_unknown_dtypes_are_unsupported_rather_than_corrupt(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_bytes({"a": entry(0, 4, [4], "F99")}, b"1234"))
    with pytest.raises(UnsupportedModelError, match="known: BOOL, U8"):
        SafetensorsIndex.open(tmp_path)


def test_damage_gives_checkpoint_errors_or_nothing(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": entry(0, 64, [4, 4], "F32"),
        "b": entry(64, 72, [4], "BF16"),
    }
    whole = file_bytes(header, bytes(range(72)))
    path, noise, num_refused = tmp_path / "model.safetensors", random.Random(3), 0
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsIndex.open(tmp_path)
    for position in range(len(whole) - 72):
        for value in (0, 0x22, whole[position] ^ 1, noise.randrange(256)):
            damaged = bytearray(whole)
            damaged[position] = value
            path.write_bytes(bytes(damaged))
            try:
                index = SafetensorsIndex.open(tmp_path)
            except CheckpointError:
                num_refused += 1
            else:
                ends = [(item.begin, item.end) for item in index.entries.values()]
                assert all(0 <= begin <= end <= len(damaged) for begin, end in ends)
    assert num_refused > 200

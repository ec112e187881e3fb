from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType
from headrace.loader import ggml_dequantize
from headrace.loader.ggml_dequantize import can_dequantize, dequantize_ggml

BLOCK_TYPES = [kind for kind, (numbers, _) in BLOCK_SIZES.items() if numbers > 1]
DECODED = [kind for kind in BLOCK_TYPES if can_dequantize(kind)]
# Where the fp16 scales lie in a block: random bytes there are kept finite.
OWN = list(ggml_dequantize._DECODERS)


def package_numbers(data: Tensor, kind: GGMLType) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType(kind))


def random_blocks(kind: GGMLType, rows: int, blocks_in_row: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (rows, blocks_in_row * BLOCK_SIZES[kind][1])
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def decode(data: Tensor, kind: GGMLType, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers, num_bytes = BLOCK_SIZES[kind]
    out = torch.full((*data.shape[:-1], data.shape[-1] // num_bytes * numbers), -7.0, dtype=dtype)
    dequantize_ggml(data, kind, out)
    return out


def test_every_type_that_the_package_decodes_is_decoded() -> None:
    package = {GGMLType(int(kind)) for kind in gguf.quants._type_traits} - {GGMLType.BF16}
    assert set(DECODED) == package
    assert {GGMLType.Q4_0, GGMLType.Q5_1, GGMLType.Q3_K, GGMLType.Q6_K} <= set(OWN)


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks_in_row"), [(1, 1), (7, 3), (33, 5)])
def test_random_bits_give_the_packages_bits(kind: GGMLType, rows: int, blocks_in_row: int) -> None:
    """Every bit pattern, infinities and NaN in the scales included."""
    data = random_blocks(kind, rows, blocks_in_row)
    ours, theirs = decode(data, kind).numpy(), package_numbers(data, kind)
    assert np.isfinite(theirs).any()
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    finite = ~np.isnan(theirs)
    assert np.array_equal(ours[finite].view(np.int32), theirs[finite].view(np.int32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_quantized_numbers_come_back_near(kind: str) -> None:
    """Against the numbers themselves, so that a layout error shared with the package would show."""
    numbers = np.random.default_rng(1).standard_normal((5, 768), dtype=np.float32)
    if kind.startswith("TQ"):
        numbers = np.sign(numbers)
    packed = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
    ours = decode(torch.from_numpy(packed), GGMLType[kind]).numpy()
    tolerance = {"Q8_0": 0.02, "Q5_0": 0.2, "Q5_1": 0.2, "TQ1_0": 1e-3, "TQ2_0": 1e-3}.get(kind, 0.7)
    assert np.abs(ours - numbers).max() < tolerance
    assert np.corrcoef(ours.ravel(), numbers.ravel())[0, 1] > 0.98


@pytest.mark.parametrize("kind", [GGMLType.Q4_1, GGMLType.Q6_K, GGMLType.IQ4_NL], ids=lambda kind: kind.name)
@pytest.mark.parametrize("small", [1 << 22, 1000])
def test_chunks_join_without_a_seam(kind: GGMLType, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_dequantize, "_SMALL_NUMBERS", small)
    for limit in ("_CHUNK_NUMBERS_SMALL", "_CHUNK_NUMBERS_PER_THREAD", "_CHUNK_NUMBERS_PACKAGE"):
        monkeypatch.setattr(ggml_dequantize, limit, 1024)
    data = random_blocks(kind, 29, 4)
    assert np.array_equal(decode(data, kind).numpy(), package_numbers(data, kind), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [GGMLType.Q5_0, GGMLType.Q4_K, GGMLType.IQ2_S], ids=lambda kind: kind.name)
def test_other_dtypes_are_the_fp32_numbers_rounded_once(kind: GGMLType, dtype: torch.dtype) -> None:
    data = random_blocks(kind, 9, 3)
    expected = decode(data, kind).to(dtype)
    assert torch.equal(decode(data, kind, dtype).nan_to_num(), expected.nan_to_num())


def test_writes_into_part_of_a_wider_buffer_and_reads_cut_columns() -> None:
    data = random_blocks(GGMLType.Q8_0, 6, 4)
    buffer = torch.full((6, 200), 3.0)
    dequantize_ggml(data[:, 34:102], GGMLType.Q8_0, buffer[:, 10:74])
    expected = torch.from_numpy(package_numbers(data, GGMLType.Q8_0))[:, 32:96]
    assert torch.equal(buffer[:, 10:74].nan_to_num(), expected.nan_to_num())
    assert (buffer[:, :10] == 3).all() and (buffer[:, 74:] == 3).all()


@pytest.mark.parametrize("kind", [GGMLType.Q8_1, GGMLType.Q8_K, GGMLType.Q1_0], ids=lambda kind: kind.name)
def test_types_that_nobody_decodes_are_known_as_such(kind: GGMLType) -> None:
    assert not can_dequantize(kind)

"""dequantize_ggml: ggml blocks to numbers, in torch, on whatever device they are.

Each decoder works on many blocks at once and repeats ggml's own arithmetic (fp16 scales widened, fp32 products, one
rounding per operation), so that results are bit-identical with the ``gguf`` package's, which is also what decodes the
rarer types here. Block layouts: ggml-quants.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headrace.checkpoint.gguf_types import BLOCK_SIZES, GGMLType

# Temporaries of a chunk stay in the cache. Torch runs an op of fewer than 32,768 numbers on the calling thread: that
# suits small tensors, where waking other threads costs more than it brings (and very much more when cores are busy).
_SMALL_NUMBERS = 1 << 22
_CHUNK_NUMBERS_SMALL = 31 << 10
_CHUNK_NUMBERS_PER_THREAD = 1 << 19
_CHUNK_NUMBERS_GPU = 1 << 26
_CHUNK_NUMBERS_PACKAGE = 1 << 17

_Decoder = Callable[[Tensor, Tensor], None]


def can_dequantize(ggml_type: GGMLType) -> bool:
    """Whether ``dequantize_ggml`` knows this block type."""
    return ggml_type in _DECODERS or _package_decodes(ggml_type)


def dequantize_ggml(data: Tensor, ggml_type: GGMLType, out: Tensor) -> None:
    """Decodes ``data`` (uint8 [..., bytes of a row]) into ``out`` ([..., numbers of a row], any float dtype).

    Numbers are decoded in fp32 and rounded once where ``out`` is narrower. The work is done on the device of ``out``.
    """
    if not out.is_contiguous():
        whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        dequantize_ggml(data, ggml_type, whole)
        out.copy_(whole)
        return
    block_numbers, block_bytes = BLOCK_SIZES[ggml_type]
    blocks = data.to(out.device).reshape(-1, block_bytes)
    numbers = out.view(-1, block_numbers)
    decode = _DECODERS.get(ggml_type)
    if decode is None:
        _decode_with_package(blocks, ggml_type, numbers)
        return
    chunk = _chunk_numbers(out) // block_numbers
    scratch = None
    if out.dtype != torch.float32:
        scratch = torch.empty(
            (min(chunk, len(blocks)), block_numbers), dtype=torch.float32, device=out.device
        )
    for start in range(0, len(blocks), chunk):
        part, target = blocks[start : start + chunk], numbers[start : start + chunk]
        if scratch is None:
            decode(part, target)
        else:
            decode(part, scratch[: len(part)])
            target.copy_(scratch[: len(part)])


def _chunk_numbers(out: Tensor) -> int:
    """How many numbers to decode at a time."""
    if out.device.type != "cpu":
        return _CHUNK_NUMBERS_GPU
    if out.numel() <= _SMALL_NUMBERS:
        return _CHUNK_NUMBERS_SMALL
    return _CHUNK_NUMBERS_PER_THREAD * torch.get_num_threads()


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte ``at`` of each block, as fp32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _shifts(blocks: Tensor, *amounts: int) -> Tensor:
    """Shift amounts [len, 1], to spread packed fields over a new dimension."""
    return torch.tensor(amounts, dtype=torch.uint8, device=blocks.device).view(-1, 1)


def _put_nibbles(quants: Tensor, out: Tensor) -> None:
    """quants [..., k] to out [..., 2k]: the low nibbles, then the high ones."""
    half = quants.shape[-1]
    out[..., :half].copy_(quants & 15)
    out[..., half:].copy_(quants >> 4)


def _decode_q4_0(blocks: Tensor, out: Tensor) -> None:
    _put_nibbles(blocks[:, 2:].contiguous(), out)
    out.sub_(8).mul_(_half(blocks, 0))


def _decode_q4_1(blocks: Tensor, out: Tensor) -> None:
    _put_nibbles(blocks[:, 4:].contiguous(), out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(high: Tensor) -> Tensor:
    """high [n, 4]: one bit per number, lowest first -> uint8 [n, 32], 16 where the bit is set."""
    bits = (high.unsqueeze(-1) >> _shifts(high, *range(8)).view(8)) & 1
    return bits.view(-1, 32) << 4


def _decode_q5_0(blocks: Tensor, out: Tensor) -> None:
    _put_nibbles(blocks[:, 6:].contiguous(), out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _decode_q5_1(blocks: Tensor, out: Tensor) -> None:
    _put_nibbles(blocks[:, 8:].contiguous(), out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _decode_q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _decode_q2_k(blocks: Tensor, out: Tensor) -> None:
    scales, quants = blocks[:, :16], blocks[:, 16:80]
    groups = out.view(-1, 16, 16)
    out.view(-1, 2, 4, 32).copy_((quants.reshape(-1, 2, 1, 32) >> _shifts(blocks, 0, 2, 4, 6)) & 3)
    groups.mul_((_half(blocks, 80) * (scales & 15)).unsqueeze(-1))
    groups.sub_((_half(blocks, 82) * (scales >> 4)).unsqueeze(-1))


def _decode_q3_k(blocks: Tensor, out: Tensor) -> None:
    high, quants, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_scales = (packed[:, None, :8] >> _shifts(blocks, 0, 4)).reshape(-1, 16) & 15
    high_scales = (packed[:, None, 8:] >> _shifts(blocks, 0, 2, 4, 6)).reshape(-1, 16) & 3
    scales = (low_scales | (high_scales << 4)).float().sub_(32)
    out.view(-1, 2, 4, 32).copy_((quants.reshape(-1, 2, 1, 32) >> _shifts(blocks, 0, 2, 4, 6)) & 3)
    # A set bit means that nothing is subtracted.
    is_low = ((high.unsqueeze(1) >> _shifts(blocks, *range(8))) & 1) ^ 1
    out.view(-1, 8, 32).sub_(is_low << 2)
    out.view(-1, 16, 16).mul_((_half(blocks, 108) * scales).unsqueeze(-1))


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """packed [n, 12] -> eight 6-bit scales and eight 6-bit minimums, uint8 [n, 8] each."""
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), 1)
    minimums = torch.cat((minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)), 1)
    return scales, minimums


def _scale_groups(blocks: Tensor, groups: Tensor) -> None:
    """Common end of Q4_K and Q5_K: groups [n, 8, 32] to d * scale * group - dmin * minimum."""
    scales, minimums = six_bit_scales(blocks[:, 4:16])
    groups.mul_((_half(blocks, 0) * scales).unsqueeze(-1))
    groups.sub_((_half(blocks, 2) * minimums).unsqueeze(-1))


def _decode_q4_k(blocks: Tensor, out: Tensor) -> None:
    _put_nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.view(-1, 4, 64))
    _scale_groups(blocks, out.view(-1, 8, 32))


def _decode_q5_k(blocks: Tensor, out: Tensor) -> None:
    high, groups = blocks[:, 16:48], out.view(-1, 8, 32)
    _put_nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.view(-1, 4, 64))
    groups.add_(((high.unsqueeze(1) >> _shifts(blocks, *range(8))) & 1) << 4)
    _scale_groups(blocks, groups)


def _decode_q6_k(blocks: Tensor, out: Tensor) -> None:
    low, high, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].view(torch.int8)
    _put_nibbles(low.reshape(-1, 2, 64), out.view(-1, 2, 128))
    high_bits = ((high.reshape(-1, 2, 1, 32) >> _shifts(blocks, 0, 2, 4, 6)) & 3) << 4
    out.view(-1, 2, 4, 32).add_(high_bits).sub_(32)
    out.view(-1, 16, 16).mul_((_half(blocks, 208) * scales).unsqueeze(-1))


_DECODERS: dict[GGMLType, _Decoder] = {
    GGMLType.Q4_0: _decode_q4_0,
    GGMLType.Q4_1: _decode_q4_1,
    GGMLType.Q5_0: _decode_q5_0,
    GGMLType.Q5_1: _decode_q5_1,
    GGMLType.Q8_0: _decode_q8_0,
    GGMLType.Q2_K: _decode_q2_k,
    GGMLType.Q3_K: _decode_q3_k,
    GGMLType.Q4_K: _decode_q4_k,
    GGMLType.Q5_K: _decode_q5_k,
    GGMLType.Q6_K: _decode_q6_k,
}


def _package_decodes(ggml_type: GGMLType) -> bool:
    """Whether the ``gguf`` package decodes this type; it is asked with one block of zeros."""
    import gguf

    block = np.zeros((1, BLOCK_SIZES[ggml_type][1]), dtype=np.uint8)
    try:
        gguf.dequantize(block, gguf.GGMLQuantizationType(ggml_type))
    except (NotImplementedError, ValueError):
        return False
    return True


def _decode_with_package(blocks: Tensor, ggml_type: GGMLType, out: Tensor) -> None:
    import gguf

    package_type = gguf.GGMLQuantizationType(ggml_type)
    chunk = _CHUNK_NUMBERS_PACKAGE // out.shape[1]
    for start in range(0, len(blocks), chunk):
        part = blocks[start : start + chunk].cpu().contiguous().numpy()
        # As one row: the package loops over groups of rows in Python. Odd bits of a scale may overflow, as in ggml.
        with np.errstate(all="ignore"):
            numbers = gguf.dequantize(part.reshape(1, -1), package_type)
        out[start : start + chunk].copy_(torch.from_numpy(numbers).view(len(part), -1))

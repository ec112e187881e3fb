"""linear in plain torch, by the fastest of torch's ways for each shape on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_MAX_FLIPPED_ROWS = 128


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, col: int = 0
) -> None:
    """out[:, col : col + n] = x @ weight.T + bias, summed in fp32.

    Args:
        x: [T, in].  weight: [n, in] of the same dtype.  bias: [n] or None.
        out: [T, at least col + n]; x's dtype or fp32.
    """
    num_rows, width = x.shape[0], weight.shape[0]
    target = out if width == out.shape[1] else out[:, col : col + width]
    if 1 < num_rows <= _MAX_FLIPPED_ROWS and x.dtype == torch.float32 and x.device.type == "cpu":
        _flipped_linear(x, weight, bias, target)
    elif target.dtype != x.dtype:
        target.copy_(F.linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=target)
    else:
        torch.addmm(bias, x, weight.t(), out=target)


def _flipped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
) -> None:
    """(weight @ x.T).T: with few rows in fp32, MKL then walks the weights once.

    On a machine with AVX2 it was faster by a tenth to a third for SmolLM2's layers at 2 to 128 rows, and by half for
    its head; but not for numbers of rows that do not fill the register tiles, so rows are padded.
    """
    num_rows = x.shape[0]
    padding = -num_rows % (4 if num_rows <= 4 else 8)
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    product = torch.mm(weight, x.t()).t()[:num_rows]
    if bias is None:
        target.copy_(product)
    else:
        torch.add(product, bias, out=target)

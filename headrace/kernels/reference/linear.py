"""linear in plain torch, and the order in memory that it likes weights to have.

Measured in fp32 on a CPU with AVX2, torch 2.13 with MKL, one thread, weights not in the cache (SmolLM2's layers and
head, and shapes up to 16384 x 2048):

* One row of x is bound by reading the weight. Stored transposed, a weight at least as wide as its inputs was read in
  60 to 90 % of the time; batches of rows took 85 to 95 %. Not so beyond some 12,000 outputs, where a batch was slower.
* Two to four rows are best multiplied the other way round, weight @ x.T: 50 to 80 % of the time; with a vocabulary's
  worth of outputs this holds for all small batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_TALL_ROWS = 12_288
_MAX_FLIPPED_ROWS = 4
_MAX_FLIPPED_ROWS_TALL = 128


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, col: int = 0
) -> None:
    """out[:, col : col + n] = x @ weight.T + bias, summed in fp32.

    Args:
        x: [T, in].  weight: [n, in] of the same dtype, in any order in memory.  bias: [n] or None.
        out: [T, at least col + n]; x's dtype or fp32.
    """
    width = weight.shape[0]
    target = out if width == out.shape[1] else out[:, col : col + width]
    if x.shape[0] > 1 and _is_flipped_faster(x, weight):
        _flipped_linear(x, weight, bias, target)
    elif target.dtype != x.dtype:
        target.copy_(F.linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=target)
    else:
        torch.addmm(bias, x, weight.t(), out=target)


def empty_weight(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a weight [n, in], in the order that ``linear`` reads fastest. A kind of kernels that has a ``linear``
    of its own has this, too."""
    is_transposed = dtype == torch.float32 and device.type == "cpu" and num_columns <= num_rows < _TALL_ROWS
    if is_transposed:
        return torch.empty((num_columns, num_rows), dtype=dtype, device=device).t()
    return torch.empty((num_rows, num_columns), dtype=dtype, device=device)


def _is_flipped_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if x.dtype != torch.float32 or x.device.type != "cpu" or not weight.is_contiguous():
        return False
    return x.shape[0] <= (_MAX_FLIPPED_ROWS if weight.shape[0] < _TALL_ROWS else _MAX_FLIPPED_ROWS_TALL)


def _flipped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
) -> None:
    """(weight @ x.T).T, with rows added to x so that they fill register tiles."""
    num_rows = x.shape[0]
    padding = -num_rows % (4 if num_rows <= 4 else 8)
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    product = torch.mm(weight, x.t()).t()[:num_rows]
    if bias is None:
        target.copy_(product)
    else:
        torch.add(product, bias, out=target)

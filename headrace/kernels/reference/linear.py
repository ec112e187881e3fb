"""linear in plain torch, and pack_weight and pack_table: the forms in memory that it reads fastest.

bf16 and fp16 go to oneDNN, for which weights are prepared once (``OneDNNWeight``). In fp32 on a CPU with AVX2 (torch
2.13 with MKL, one thread, weights not in the cache; benchmarks/kernels/bench_linear.py):

* One row of x is bound by reading the weight. Stored transposed, a weight at least as wide as its inputs is read in
  60 to 90 % of the time, and batches take 85 to 95 %. Longer rows than some 12,000 make batches slower, so a
  vocabulary is cut into blocks of a few thousand, each transposed.
* Two to four rows times a weight that is not transposed are best multiplied the other way round, weight @ x.T.

A table stays row by row for ``embedding``. Times one row in bf16, matrix times vector takes 60 to 80 % of the time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.reference.onednn_weight import OneDNNWeight

_MAX_TRANSPOSED_ROWS = 12_288
_BLOCK_ROWS = range(1024, 4096 + 1)
_MAX_FLIPPED_ROWS = 4


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | OneDNNWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    col: int = 0,
) -> None:
    """out[:, col : col + n] = x @ weight.T + bias, summed in fp32.

    Args:
        x: [T, in].
        weight: [n, in] of the same dtype, in any order in memory, or blocks of it, [n / B, B, in]; or as
            ``OneDNNWeight``.
        bias: [n] or None.
        out: [T, at least col + n]; x's dtype or fp32.
    """
    width = weight.shape[0]
    if isinstance(weight, OneDNNWeight):
        target = out if width == out.shape[1] else out[:, col : col + width]
        target.copy_(weight.multiply(x, bias))
        return
    if weight.dim() == 3:
        for index, block in enumerate(weight):
            start = index * len(block)
            linear(x, block, None if bias is None else bias[start : start + len(block)], out, col + start)
        return
    target = out if width == out.shape[1] else out[:, col : col + width]
    if 1 < x.shape[0] <= _MAX_FLIPPED_ROWS and _is_row_major_on_cpu(weight, torch.float32):
        _flipped_linear(x, weight, bias, target)
    elif x.shape[0] == 1 and bias is None and _is_row_major_on_cpu(weight, torch.bfloat16):
        target.copy_(torch.mv(weight, x[0]))
    elif target.dtype != x.dtype:
        target.copy_(F.linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=target)
    else:
        torch.addmm(bias, x, weight.t(), out=target)


def pack_weight(weight: torch.Tensor) -> torch.Tensor | OneDNNWeight:
    """A weight [n, in] in the form that ``linear`` reads fastest: a ``OneDNNWeight`` where there is one, else as
    ``pack_table`` does it. A kind of kernels with its own ``linear`` may have its own ``pack_weight``."""
    return OneDNNWeight(weight) if OneDNNWeight.is_supported(weight) else pack_table(weight)


def pack_table(weight: torch.Tensor) -> torch.Tensor:
    """A weight [n, in] that ``embedding`` reads as well: itself, a copy in another order, or a copy in blocks
    [n / B, B, in]. A kind with its own ``pack_weight`` has its own ``pack_table``, of what its ``embedding`` takes."""
    num_rows, num_columns = weight.shape
    if not _is_row_major_on_cpu(weight, torch.float32) or num_rows < num_columns:
        return weight
    if num_rows < _MAX_TRANSPOSED_ROWS:
        return weight.t().contiguous().t()
    sizes = [size for size in _BLOCK_ROWS if num_rows % size == 0]
    if not sizes:
        return weight
    return weight.view(-1, sizes[-1], num_columns).transpose(1, 2).contiguous().transpose(1, 2)


def weight_dtype(stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The type that a weight which is stored as ``stored`` is kept in, for ``linear`` to multiply with activations of
    type ``compute``: here that type. It is never less precise than what is stored, unless ``compute`` is."""
    return compute


def _is_row_major_on_cpu(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    return weight.dtype == dtype and weight.device.type == "cpu" and weight.is_contiguous()


def _flipped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
) -> None:
    """(weight @ x.T).T, with rows added to x so that they fill a register tile."""
    num_rows = x.shape[0]
    if num_rows < _MAX_FLIPPED_ROWS:
        x = F.pad(x, (0, 0, 0, _MAX_FLIPPED_ROWS - num_rows))
    product = torch.mm(weight, x.t()).t()[:num_rows]
    if bias is None:
        target.copy_(product)
    else:
        torch.add(product, bias, out=target)

"""embedding and gather_rows in plain torch."""

from __future__ import annotations

import torch


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    first_row: int | None = None,
) -> None:
    """out[t] = weight[ids[t]] * scale.

    Args:
        ids: [T] int64, all in [0, V).
        weight: [V, E]; may be stored in a narrower dtype than ``out``.
        out: [T, E].
        scale: rounded to the dtype of ``out`` before it multiplies, as Gemma does.
        first_row: for a table that holds only the rows of the vocabulary from this one on: ids outside give zeros.
    """
    if first_row is not None:
        local = ids - first_row
        is_outside = (local < 0) | (local >= len(weight))
        embedding(local.masked_fill(is_outside, 0), weight, out, scale)
        out.masked_fill_(is_outside[:, None], 0.0)
        return
    if weight.dtype == out.dtype:
        torch.index_select(weight, 0, ids, out=out)
    else:
        out.copy_(weight.index_select(0, ids))
    if scale != 1.0:
        out.mul_(torch.tensor(scale, dtype=out.dtype).item())


def gather_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = x[rows[r]].

    Args:
        x: [T, E].  rows: [R] int64.  out: [R, E].
    """
    torch.index_select(x, 0, rows, out=out)

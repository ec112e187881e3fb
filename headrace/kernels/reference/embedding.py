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
        weight: [V, E], or blocks of it, [V / B, B, E] (``pack_table``); may have a narrower dtype than ``out``.
        out: [T, E].
        scale: rounded to the dtype of ``out`` before it multiplies, as Gemma does.
        first_row: for a table that holds only the rows of the vocabulary from this one on: ids outside give zeros.
    """
    if first_row is not None:
        _embed_part(ids - first_row, weight, out, scale)
        return
    if weight.dim() == 3:
        block_rows = weight.shape[1]
        out.copy_(weight[ids // block_rows, ids % block_rows])
    elif weight.dtype == out.dtype:
        torch.index_select(weight, 0, ids, out=out)
    else:
        out.copy_(weight.index_select(0, ids))
    if scale != 1.0:
        out.mul_(torch.tensor(scale, dtype=out.dtype, device="cpu").item())


def _embed_part(local_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    num_rows = weight.shape[:-1].numel()
    is_outside = (local_ids < 0) | (local_ids >= num_rows)
    if num_rows:
        embedding(local_ids.masked_fill(is_outside, 0), weight, out, scale)
    out.masked_fill_(is_outside[:, None], 0.0)


def gather_rows(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = x[index[r]].

    Args:
        x: [T, E].  index: [R] int64.  out: [R, E].
    """
    torch.index_select(x, 0, index, out=out)

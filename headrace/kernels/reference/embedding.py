"""embedding and gather_rows in plain torch."""

from __future__ import annotations

import torch


def embedding(ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    """out[t] = weight[ids[t]] * scale.

    Args:
        ids: [T] int64, all in [0, V).
        weight: [V, E].
        out: [T, E] of the weight's dtype.
        scale: rounded to the dtype before it multiplies, as Gemma does.
    """
    torch.index_select(weight, 0, ids, out=out)
    if scale != 1.0:
        out.mul_(torch.tensor(scale, dtype=out.dtype).item())


def gather_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = x[rows[r]].

    Args:
        x: [T, E].  rows: [R] int64.  out: [R, E].
    """
    torch.index_select(x, 0, rows, out=out)

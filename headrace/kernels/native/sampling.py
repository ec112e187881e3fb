"""The sampling functions of kernels/reference/sampling.py, of which picking the best token is native."""

from __future__ import annotations

import torch

from headrace.kernels.native.run import check_rows, run
from headrace.kernels.native.structs import RowArgmaxArgs
from headrace.kernels.reference.sampling import log_normalizer, sample_rows, token_ranks, top_tokens

__all__ = ["log_normalizer", "row_argmax", "sample_rows", "token_ranks", "top_tokens"]


def row_argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    check_rows(x=x)
    assert x.dtype == torch.float32
    num_rows, width = x.shape
    values, indices = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    args = RowArgmaxArgs(
        rows=num_rows,
        x=x.data_ptr(),
        values=values.data_ptr(),
        indices=indices.data_ptr(),
        stride=x.stride(0),
        width=width,
    )
    run(args, x.numel())
    return values, indices

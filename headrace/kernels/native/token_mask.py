"""Token masks of constrained requests; only what is forbidden is written."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.native.run import check_rows, run
from headrace.kernels.native.structs import TokenMaskArgs


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Forbid tokens in place; see ``kernels.reference.token_mask`` for the arguments."""
    check_rows(logits=logits, words=words)
    assert logits.dtype == torch.float32 and words.dtype == torch.int32 and rows.dtype == torch.int64
    rows, words = rows.contiguous(), words.contiguous()
    args = TokenMaskArgs(
        rows=len(rows),
        logits=logits.data_ptr(),
        masked_rows=rows.data_ptr(),
        words=words.data_ptr(),
        num_words=words.shape[1],
        stride=logits.stride(0),
        width=logits.shape[1],
    )
    run(args, len(rows) * logits.shape[1], len(rows))

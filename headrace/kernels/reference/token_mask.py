"""Token masks of constrained requests: logits of forbidden tokens become -inf.

Legend: R rows of logits, V vocabulary, N masked rows, W words of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Forbid tokens in place.

    Args:
        logits: [R, V] float32.
        rows: [N] int64, the rows that are masked, none twice.
        words: [N, W] int32; bit i of word w allows token 32 * w + i. Tokens past the last word are forbidden.
    """
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=words.device)
    is_banned = torch.bitwise_and(words.view(torch.uint8)[:, :, None], bits).eq(0).flatten(1)
    num_known = min(is_banned.shape[1], logits.shape[1])
    masked = logits.index_select(0, rows)
    masked[:, num_known:] = -torch.inf
    masked[:, :num_known].masked_fill_(is_banned[:, :num_known], -torch.inf)
    logits.index_copy_(0, rows, masked)

"""Token masks of constrained requests. A program reads the mask's words for one block of tokens of one row, and writes
only where it forbids: what is allowed is neither read nor written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import INTERPRETED, launch_options, let_next_start, wait_for_previous

_BLOCK = 64 if INTERPRETED else 4096


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Forbid tokens in place; see ``kernels.reference.token_mask`` for the arguments."""
    num_rows, vocab_size = len(rows), logits.shape[1]
    if num_rows:
        _mask_kernel[triton.cdiv(vocab_size, _BLOCK), num_rows](
            logits,
            rows,
            words,
            logits.stride(0),
            words.stride(0),
            vocab_size,
            words.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
            **launch_options(),
        )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _mask_kernel(
    logits_ptr,
    rows_ptr,
    words_ptr,
    logits_stride,
    words_stride,
    vocab_size,
    num_words,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    word = tl.load(words_ptr + row * words_stride + (tokens >> 5), mask=(tokens >> 5) < num_words, other=0)
    is_banned = ((word >> (tokens & 31)) & 1) == 0
    target = logits_ptr + tl.load(rows_ptr + row) * logits_stride + tokens
    tl.store(target, float("-inf"), mask=is_banned & (tokens < vocab_size))

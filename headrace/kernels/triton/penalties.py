"""Repetition, frequency and presence penalties, from the device's table of tokens.

Two passes over the tokens of each row: the first counts them in a row of zeros as wide as the vocabulary, the second
takes each count out again; whoever takes it penalizes that token's logit, so each is changed once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import INTERPRETED, launch_options, let_next_start, wait_for_previous

_BLOCK = 64 if INTERPRETED else 1024
_MAX_COUNTS = 1 << 24  # numbers in the scratch: 64 MiB
_IN_PROMPT = tl.constexpr(1 << 30)


def apply_penalties(
    logits: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    max_length: int,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Change ``logits`` [R, V] float32 in place; see ``headrace.runtime.penalties.Penalties`` for the arguments."""
    vocab_size = logits.shape[1]
    step = max(1, _MAX_COUNTS // vocab_size)
    num_rows = len(rows)
    if num_rows == 0 or max_length == 0:
        return
    counts = torch.zeros((min(step, num_rows), vocab_size), dtype=torch.int32, device=logits.device)
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        table = (token_table, slots[part], lengths[part], num_prompt_tokens[part], counts)
        grid = (triton.cdiv(max_length, _BLOCK), len(rows[part]))
        sizes = (token_table.stride(0), vocab_size)
        options = {"BLOCK": _BLOCK, "num_warps": 4, **launch_options()}
        _count_kernel[grid](*table, *sizes, **options)
        _penalize_kernel[grid](
            *table,
            logits,
            rows[part],
            repetition[part],
            frequency[part],
            presence[part],
            *sizes,
            logits.stride(0),
            **options,
        )


@triton.jit
def _tokens_of(table_ptr, slots_ptr, lengths_ptr, row, table_stride, BLOCK: tl.constexpr):
    """(places, tokens, whether there is one) of one block of a row's tokens."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.load(lengths_ptr + row)
    tokens = tl.load(table_ptr + tl.load(slots_ptr + row) * table_stride + place, mask=inside, other=0)
    return place, tokens, inside


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "prompt_lengths_ptr"])
def _count_kernel(
    table_ptr,
    slots_ptr,
    lengths_ptr,
    prompt_lengths_ptr,
    counts_ptr,
    table_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    place, tokens, inside = _tokens_of(table_ptr, slots_ptr, lengths_ptr, row, table_stride, BLOCK)
    is_output = place >= tl.load(prompt_lengths_ptr + row)
    target = counts_ptr + row * vocab_size + tokens
    tl.atomic_add(target, 1, mask=inside & is_output, sem="relaxed")
    tl.atomic_or(target, _IN_PROMPT, mask=inside & (~is_output), sem="relaxed")


@triton.jit(
    do_not_specialize_on_alignment=[
        *("slots_ptr", "lengths_ptr", "prompt_lengths_ptr", "rows_ptr"),
        *("repetition_ptr", "frequency_ptr", "presence_ptr"),
    ]
)
def _penalize_kernel(
    table_ptr,
    slots_ptr,
    lengths_ptr,
    prompt_lengths_ptr,
    counts_ptr,
    logits_ptr,
    rows_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    table_stride,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    _, tokens, inside = _tokens_of(table_ptr, slots_ptr, lengths_ptr, row, table_stride, BLOCK)
    taken = tl.atomic_xchg(counts_ptr + row * vocab_size + tokens, 0, mask=inside, sem="relaxed")
    is_first = inside & (taken != 0)
    count = (taken & (_IN_PROMPT - 1)).to(tl.float32)
    target = logits_ptr + tl.load(rows_ptr + row) * logits_stride + tokens
    logit = tl.load(target, mask=is_first, other=0.0)
    repetition = tl.load(repetition_ptr + row)
    logit = tl.where(logit > 0, logit / repetition, logit * repetition)
    logit -= tl.load(frequency_ptr + row) * count + tl.load(presence_ptr + row) * (count > 0).to(tl.float32)
    tl.store(target, logit, mask=is_first)

"""Picking tokens from logits on a GPU: no sort of the vocabulary, no wait for the host. See the reference of this name.

A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headrace.kernels.triton.launch import INTERPRETED, launch_options
from headrace.kernels.triton.sampling_kernels import (
    chunk_argmax_kernel,
    chunk_larger_kernel,
    chunk_log_sum_kernel,
    chunk_race_kernel,
    log_sum_kernel,
    row_argmax_kernel,
)
from headrace.kernels.triton.threshold_kernels import threshold_kernel, top_tokens_kernel

_CHUNK = 64 if INTERPRETED else 4096
_BLOCK = 64 if INTERPRETED else 2048
_CAPACITY = 32 if INTERPRETED else 2048
_SEARCH_WARPS = 16
_MAX_TOP = 64


def row_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row [R, V] and its lowest index: ([R], [R] int64). NaN counts as largest."""
    return _best_of_chunks(*_chunk_argmax(x))


def sample_rows(
    logits: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    key: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    max_top_k: int = 0,
) -> Tensor:
    """See ``headrace.kernels.reference.sampling.sample_rows``. ``max_top_k`` is not needed here."""
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    threshold = None
    if top_k is not None or top_p is not None:
        threshold = _thresholds(logits, row_max, temperature, top_k, top_p, min_p)
    elif min_p is not None:
        threshold = min_p
    return _best_of_chunks(*_chunk_race(logits, row_max, temperature, threshold, key))[1]


def slice_argmax(logits: Tensor, first_token: int) -> Tensor:
    """See ``headrace.kernels.reference.sampling.slice_argmax``."""
    return _candidate_of_chunks(*_chunk_argmax(logits), first_token)


def slice_race(logits: Tensor, row_max: Tensor, temperature: Tensor, key: Tensor, first_token: int) -> Tensor:
    """See ``headrace.kernels.reference.sampling.slice_race``."""
    return _candidate_of_chunks(
        *_chunk_race(logits, row_max, temperature, None, key, first_token), first_token
    )


def best_candidates(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """See ``headrace.kernels.reference.sampling.best_candidates``."""
    values, tokens = candidates[:, 0].view(torch.float32), candidates[:, 1]
    return _best_of_chunks(values.T, tokens.T)


def log_normalizer(logits: Tensor) -> Tensor:
    """log(sum(exp(row))) of each row [R, V] fp32, [R] float32."""
    num_rows, num_tokens, num_chunks = _sizes(logits)
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return out
    tops = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty((num_rows, num_chunks), dtype=torch.float64, device=logits.device)
    options = launch_options()
    chunk_log_sum_kernel[(num_chunks, num_rows)](
        logits, tops, sums, logits.stride(0), num_tokens, CHUNK=_CHUNK, num_warps=8, **options
    )
    block = triton.next_power_of_2(num_chunks)
    log_sum_kernel[(num_rows,)](tops, sums, out, num_chunks, BLOCK=block, num_warps=1, **options)
    return out


def token_ranks(logits: Tensor, token_logits: Tensor) -> Tensor:
    """1 + the number of tokens with a larger logit, [R] int64."""
    num_rows, num_tokens, num_chunks = _sizes(logits)
    counts = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    if num_rows:
        chunk_larger_kernel[(num_chunks, num_rows)](
            logits, token_logits, counts, logits.stride(0), num_tokens, CHUNK=_CHUNK, num_warps=8,
            **launch_options(),
        )  # fmt: skip
    return counts.sum(-1, dtype=torch.int64) + 1


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest logits of each row and their indices, falling, the lower index first among equals."""
    num_rows, num_tokens, _ = _sizes(logits)
    if count > min(_MAX_TOP, num_tokens - 1):
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    values = logits.new_empty((num_rows, count))
    ids = torch.empty((num_rows, count), dtype=torch.int64, device=logits.device)
    if num_rows:
        scratch = logits.new_empty((num_rows, _CAPACITY))
        top_tokens_kernel[(num_rows,)](
            logits, values, ids, scratch, logits.stride(0), num_tokens, count,
            WIDTH=max(triton.next_power_of_2(count), 16), BLOCK=_BLOCK, CAPACITY=_CAPACITY,
            num_warps=_SEARCH_WARPS, **launch_options(),
        )  # fmt: skip
    return values, ids


def _chunk_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """([R, C], [R, C] int32): the largest number of each chunk and its lowest index in the row."""
    num_rows, num_tokens, num_chunks = _sizes(x)
    values = x.new_empty((num_rows, num_chunks))
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=x.device)
    if num_rows:
        chunk_argmax_kernel[(num_chunks, num_rows)](
            x, values, ids, x.stride(0), num_tokens, CHUNK=_CHUNK, num_warps=8, **launch_options()
        )
    return values, ids


def _chunk_race(
    logits: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    key: Tensor,
    first_token: int = 0,
) -> tuple[Tensor, Tensor]:
    """([R, C] float32, [R, C] int32): the best score of each chunk and its index in the row."""
    num_rows, num_tokens, num_chunks = _sizes(logits)
    values = logits.new_empty((num_rows, num_chunks))
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    if num_rows:
        chunk_race_kernel[(num_chunks, num_rows)](
            logits, row_max, temperature, row_max if threshold is None else threshold, key, values, ids,
            logits.stride(0), num_tokens, first_token,
            CHUNK=_CHUNK, HAS_THRESHOLD=threshold is not None, num_warps=8, **launch_options(),
        )  # fmt: skip
    return values, ids


def _best_of_chunks(chunk_values: Tensor, chunk_ids: Tensor) -> tuple[Tensor, Tensor]:
    """([R], [R] int64): the best of each row's chunks [R, C] and its index."""
    values = chunk_values.new_empty(len(chunk_values))
    ids = torch.empty(len(chunk_ids), dtype=torch.int64, device=values.device)
    _pick_chunks(chunk_values, chunk_ids, values, ids, 0)
    return values, ids


def _candidate_of_chunks(chunk_values: Tensor, chunk_ids: Tensor, first_token: int) -> Tensor:
    """[2, R] int32: the bits of the best of each row's chunks [R, C], and its token."""
    out = torch.empty((2, len(chunk_ids)), dtype=torch.int32, device=chunk_ids.device)
    _pick_chunks(chunk_values, chunk_ids, out[0].view(torch.float32), out[1], first_token)
    return out


def _pick_chunks(chunk_values: Tensor, chunk_ids: Tensor, values: Tensor, ids: Tensor, first_id: int) -> None:
    """Into values and ids [R]: of chunks [R, C], whose ids are increasing, laid out alike."""
    num_rows, num_chunks = chunk_values.shape
    if num_rows:
        row_argmax_kernel[(num_rows,)](
            chunk_values, chunk_ids, values, ids, num_chunks, *chunk_values.stride(), first_id,
            BLOCK=triton.next_power_of_2(num_chunks), num_warps=1, **launch_options(),
        )  # fmt: skip


def _thresholds(
    logits: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """[R] float32: the smallest weight that the filters keep."""
    num_rows, num_tokens = logits.shape
    threshold = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    scratch = logits.new_empty((num_rows, _CAPACITY))
    threshold_kernel[(num_rows,)](
        logits, row_max, temperature,
        row_max if top_k is None else top_k,
        row_max if top_p is None else top_p,
        row_max if min_p is None else min_p,
        threshold, scratch, logits.stride(0), num_tokens,
        HAS_TOP_K=top_k is not None, HAS_TOP_P=top_p is not None, HAS_MIN_P=min_p is not None,
        BLOCK=_BLOCK, CAPACITY=_CAPACITY, num_warps=_SEARCH_WARPS, **launch_options(),
    )  # fmt: skip
    return threshold


def _sizes(logits: Tensor) -> tuple[int, int, int]:
    """(rows, tokens, chunks of a row)."""
    num_rows, num_tokens = logits.shape
    return num_rows, num_tokens, triton.cdiv(num_tokens, _CHUNK)

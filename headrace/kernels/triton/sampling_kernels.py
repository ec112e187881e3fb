"""Kernels of ``sampling`` that go over whole rows of logits in chunks, many programs a row.

Legend: R rows, V vocabulary, C chunks of a row, S numbers in a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.noise import exponential_of


@triton.jit
def load_logits(row_ptr, col, num_tokens):
    """fp32 logits of a row; -inf past its end."""
    return tl.load(row_ptr + col, mask=col < num_tokens, other=-float("inf"))


@triton.jit
def weights_of(logits, row_max, temperature):
    """exp((logit - max) / temperature), in [0, 1]; the same bits wherever it is called."""
    return tl.exp((logits - row_max) / temperature)


@triton.jit
def chunk_argmax_kernel(
    logits_ptr, values_ptr, ids_ptr, row_stride, num_tokens, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Largest number of each chunk and its lowest index; NaN counts as largest."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    col = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    logits = load_logits(logits_ptr + row * row_stride, col, num_tokens)
    is_nan = logits != logits
    logits = tl.where(is_nan, float("inf"), logits)
    best = tl.max(logits, axis=0)
    index = tl.min(tl.where((logits == best) & (col < num_tokens), col, num_tokens - 1), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    place = row * tl.num_programs(0) + chunk
    tl.store(values_ptr + place, tl.where(has_nan, float("nan"), best))
    tl.store(ids_ptr + place, index)


@triton.jit(
    do_not_specialize=["num_chunks", "row_stride", "chunk_stride", "first_id"],
    do_not_specialize_on_alignment=["chunk_values_ptr", "chunk_ids_ptr", "values_ptr", "ids_ptr"],
)
def row_argmax_kernel(
    chunk_values_ptr, chunk_ids_ptr, values_ptr, ids_ptr, num_chunks, row_stride, chunk_stride, first_id,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of each row's chunks; its id counts from ``first_id``."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    wait_for_previous(PDL)
    place = row * row_stride + chunk * chunk_stride
    values = tl.load(chunk_values_ptr + place, mask=inside, other=-float("inf"))
    ids = tl.load(chunk_ids_ptr + place, mask=inside, other=0x7FFFFFFF)
    is_nan = values != values
    keys = tl.where(is_nan, float("inf"), values)
    best = tl.max(keys, axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    index = tl.min(tl.where((keys == best) & inside, ids, 0x7FFFFFFF), axis=0)
    tl.store(values_ptr + row, tl.where(has_nan, float("nan"), best))
    tl.store(ids_ptr + row, (index + first_id).to(ids_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["row_max_ptr", "temperature_ptr", "threshold_ptr", "key_ptr"],
)
def chunk_race_kernel(
    logits_ptr, row_max_ptr, temperature_ptr, threshold_ptr, key_ptr, values_ptr, ids_ptr, row_stride, num_tokens,
    first_token, CHUNK: tl.constexpr, HAS_THRESHOLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk's winner, the largest weight / noise, and its score; weights below the row's threshold lose.

    The noise is that of tokens from ``first_token`` on.
    """
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    col = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    logits = load_logits(logits_ptr + row * row_stride, col, num_tokens)
    weights = weights_of(logits, tl.load(row_max_ptr + row), tl.load(temperature_ptr + row))
    if HAS_THRESHOLD:
        weights = tl.where(weights >= tl.load(threshold_ptr + row), weights, 0.0)
    scores = weights / exponential_of(tl.load(key_ptr + row), first_token + col)
    best = tl.max(scores, axis=0)
    index = tl.min(tl.where((scores == best) & (col < num_tokens), col, num_tokens - 1), axis=0)
    place = row * tl.num_programs(0) + chunk
    tl.store(values_ptr + place, best)
    tl.store(ids_ptr + place, index)


@triton.jit
def chunk_log_sum_kernel(
    logits_ptr, tops_ptr, sums_ptr, row_stride, num_tokens, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Largest logit of each chunk, and the sum of exp(logit - largest)."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    wait_for_previous(PDL)
    logits = load_logits(logits_ptr + row * row_stride, chunk * CHUNK + tl.arange(0, CHUNK), num_tokens)
    top = tl.max(logits, axis=0)
    weights = tl.where(logits == -float("inf"), 0.0, tl.exp(logits - top))
    place = row * tl.num_programs(0) + chunk
    tl.store(tops_ptr + place, top)
    tl.store(sums_ptr + place, tl.sum(weights.to(tl.float64), axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def log_sum_kernel(tops_ptr, sums_ptr, out_ptr, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """log(sum(exp(row))) of each row from its chunks."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    wait_for_previous(PDL)
    tops = tl.load(tops_ptr + row * num_chunks + chunk, mask=inside, other=-float("inf"))
    sums = tl.load(sums_ptr + row * num_chunks + chunk, mask=inside, other=0.0)
    top = tl.max(tops, axis=0)
    shares = tl.where(tops == -float("inf"), 0.0, tl.exp(tops - top))
    total = tl.sum(sums * shares.to(tl.float64), axis=0)
    tl.store(out_ptr + row, (tl.log(total) + top.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=["token_logits_ptr"])
def chunk_larger_kernel(
    logits_ptr, token_logits_ptr, counts_ptr, row_stride, num_tokens, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """How many numbers of each chunk are larger than the row's own."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    wait_for_previous(PDL)
    logits = load_logits(logits_ptr + row * row_stride, chunk * CHUNK + tl.arange(0, CHUNK), num_tokens)
    larger = (logits > tl.load(token_logits_ptr + row)).to(tl.int32)
    tl.store(counts_ptr + row * tl.num_programs(0) + chunk, tl.sum(larger, axis=0))

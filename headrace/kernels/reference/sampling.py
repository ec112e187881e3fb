"""Picking tokens from logits: argmax, filtered sampling by the Gumbel-max trick, log-probabilities.

Legend: R rows, V vocabulary, C chunks of a row, S numbers in a chunk.

Every row's result is bitwise the same whatever rows are beside it, so nothing here reduces a whole row with one
library call (on a CPU those are split over threads when there is one row only): a row is summed by chunks of fixed
size, and the chunks by a sequential cumulative sum in float64.

Why Gumbel-max and not the inverse of a running sum: the last bits of logits change with the size of the batch. In a
flat tail of 50,000 tokens that moves the running sum past a token or two, and a seeded answer would not repeat; here
the token changes only where the two best scores are equal to those bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.reference.noise import exponentials, keys_from

_CHUNK = 256
_NUM_RANKED = 2048


def row_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row and its lowest index: ([R] of x's dtype, [R] int64). NaN counts as largest.

    In two levels, which takes half the time of torch's max over the rows of a batch; over one row max is faster.

    Args:
        x: [R, V], rows contiguous.
    """
    if len(x) == 1:
        value, token = x.max(-1)
        return value, token
    chunks = _chunks(x, -torch.inf)
    values, chunk = chunks.amax(-1).max(-1)
    inner = _take_chunk(chunks, chunk).argmax(-1)
    return values, chunk * chunks.shape[-1] + inner


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
    """One token a row, [R] int64, drawn from the filtered softmax(logits / temperature).

    Each token races for a time that is exponentially distributed with its weight as the rate; the first one is taken
    (the Gumbel-max trick, without its logarithms).

    Filters in vLLM's order: min_p keeps tokens at least min_p times as likely as the best; top_k the k best; top_p the
    smallest set of the best that holds top_p of what is left. Tokens as likely as the last one kept are kept as well,
    so that nothing hangs on the order of a sort.

    Args:
        logits: [R, V] float32, not changed.
        row_max: [R] float32, each row's largest logit.
        temperature: [R] float32, > 0.
        key: [R] int64, the noise of each row.
        top_k: [R] int64, 0 keeps all; with ``max_top_k``, the largest of them.
        top_p: [R] float32 in (0, 1], 1 keeps all.
        min_p: [R] float32 in [0, 1].
    """
    weights = filtered_weights(logits, row_max, temperature, top_k, top_p, min_p, max_top_k)
    return row_argmax(weights.div_(exponentials(key, weights.shape[1])))[1]


def slice_argmax(logits: Tensor, first_token: int) -> Tensor:
    """Candidates [2, R] int32 of a slice of the vocabulary: the bits of each row's largest logit, and its token.

    Args:
        logits: [R, n] float32, of n tokens from ``first_token`` on; n > 0.
    """
    values, tokens = row_argmax(logits)
    return pack_candidates(values, tokens, first_token)


def slice_race(logits: Tensor, row_max: Tensor, temperature: Tensor, key: Tensor, first_token: int) -> Tensor:
    """Candidates [2, R] int32 of a slice of the vocabulary: the bits of the winner's score, and its token.

    Scores and noise are those of ``sample_rows`` over the whole vocabulary. Other arguments as there, without filters.

    Args:
        logits: [R, n] float32, of n tokens from ``first_token`` on; n > 0.
        row_max: [R] float32, the largest of each whole row.
    """
    weights = filtered_weights(logits, row_max, temperature)
    noise = exponentials(keys_from(key, first_token), weights.shape[1])
    values, tokens = row_argmax(weights.div_(noise))
    return pack_candidates(values, tokens, first_token)


def pack_candidates(values: Tensor, tokens: Tensor, first_token: int) -> Tensor:
    """[2, R] int32 of [R] float32 and of [R] int64, counted from the slice's first token."""
    return torch.stack((values.view(torch.int32), (tokens + first_token).int()))


def best_candidates(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The best of the slices' candidates [slices, 2, R]: ([R] float32, [R] int64), as ``row_argmax`` of whole rows.

    Slices are in the order of their tokens, so that of equals the first has the lowest.
    """
    values, place = row_argmax(candidates[:, 0].view(torch.float32).T.contiguous())
    return values, candidates[:, 1].T.gather(1, place[:, None])[:, 0].long()


def filtered_weights(
    logits: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    max_top_k: int = 0,
) -> Tensor:
    """Likelihoods relative to the best token, [R, V]; 0 where a filter drops one. Arguments as ``sample_rows``."""
    weights = torch.sub(logits, row_max[:, None]).div_(temperature[:, None]).exp_()
    threshold, best = min_p, weights[:, :0]
    if top_k is not None or top_p is not None:
        best = _largest(
            weights, min(max(max_top_k, _NUM_RANKED if top_p is not None else 1), weights.shape[1])
        )
    if top_k is not None:
        last = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1)[:, None])[:, 0]
        last = torch.where(top_k > 0, last, 0.0)
        threshold = last if threshold is None else torch.maximum(threshold, last)
    if top_p is not None:
        nucleus = _top_p_threshold(weights, best[:, :_NUM_RANKED], threshold, top_p)
        threshold = nucleus if threshold is None else torch.maximum(threshold, nucleus)
    if threshold is not None:
        weights.mul_(torch.ge(weights, threshold[:, None], out=torch.empty_like(weights)))
    return weights


def log_normalizer(logits: Tensor) -> Tensor:
    """log(sum(exp(row))) of each row, [R] float32.

    Args:
        logits: [R, V] float32.
    """
    row_max, _ = row_argmax(logits)
    sums = _row_sums(torch.sub(logits, row_max[:, None]).exp_())
    return (sums.log() + row_max).float()


def token_ranks(logits: Tensor, token_logits: Tensor) -> Tensor:
    """1 + the number of tokens with a larger logit, [R] int64.

    Args:
        logits: [R, V] float32.
        token_logits: [R] float32, the logit of the row's token.
    """
    larger = torch.gt(logits, token_logits[:, None], out=torch.empty_like(logits))
    return _chunks(larger, 0.0).sum(-1).sum(-1).long() + 1


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest logits of each row and their indices, falling, the lower index first among equals.

    Args:
        logits: [R, V] float32.
        count: at most V.
    """
    if count == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(count, dim=-1)
    last = values[:, -1:]
    num_candidates = _chunks(torch.ge(logits, last, out=torch.empty_like(logits)), 0.0).sum(-1).sum(-1)
    tied = (num_candidates > count).nonzero()[:, 0]
    if tied.numel():  # which of the equal ones topk takes is not defined
        ids.index_copy_(0, tied, _lowest_ids(logits[tied], last[tied], count))
    ids = ids.sort(-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _lowest_ids(logits: Tensor, last: Tensor, count: int) -> Tensor:
    """[R, count]: indices of the logits above ``last`` [R, 1], filled up with the first of those equal to it."""
    is_larger, is_equal = logits > last, logits == last
    room = count - is_larger.sum(-1, keepdim=True)
    return (is_larger | (is_equal & (is_equal.cumsum(-1) <= room))).nonzero()[:, 1].view(-1, count)


def _top_p_threshold(weights: Tensor, best: Tensor, lowest: Tensor | None, top_p: Tensor) -> Tensor:
    """[R]: the largest w such that the weights >= w hold ``top_p`` of the sum of those >= ``lowest``.

    It is 0 where top_p is 1. The largest weights, ``best``, mostly hold enough; whole rows are sorted only where they
    are really flat. A row's running sums do not depend on how many weights are looked at.
    """
    target = _row_sums(_keep(weights, lowest)) * top_p
    place, is_found = _first_reaching(_keep(best, lowest), target)
    threshold = best.gather(1, place[:, None])[:, 0].masked_fill_(top_p >= 1.0, 0.0)
    flat = (~is_found & (top_p < 1.0)).nonzero()[:, 0]
    if flat.numel():
        best = _largest(weights.index_select(0, flat), weights.shape[1])
        kept = _keep(best, None if lowest is None else lowest[flat])
        # Where rounding leaves even the whole sum short, the place is the last one: all weights stay.
        place, _ = _first_reaching(kept, target[flat])
        threshold.index_copy_(0, flat, best.gather(1, place[:, None])[:, 0])
    return threshold


def _keep(weights: Tensor, lowest: Tensor | None) -> Tensor:
    """The weights >= lowest [R], 0 for the others."""
    if lowest is None:
        return weights
    return torch.ge(weights, lowest[:, None], out=torch.empty_like(weights)).mul_(weights)


def _largest(x: Tensor, count: int) -> Tensor:
    """[R, count]: each row's largest numbers, falling."""
    if x.device.type != "cpu":
        return x.topk(count, dim=-1).values
    # numpy selects and sorts with vector instructions, many times faster than torch on a CPU
    negative: np.ndarray = x.neg().numpy()
    if count < x.shape[1]:
        negative = np.partition(negative, count - 1, axis=-1)[:, :count]
    return torch.from_numpy(np.sort(negative, axis=-1)).neg_()


def _first_reaching(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """([R] int64, [R] bool): the first index whose running sum is ``target`` or more, and whether there is one."""
    chunks = _chunks(weights, 0.0)
    sums = chunks.sum(-1).cumsum(-1, dtype=torch.float64)
    place = _place(chunks, sums, torch.nextafter(target, torch.zeros_like(target)))
    return place.clamp_(max=weights.shape[1] - 1), sums[:, -1] >= target


def _place(chunks: Tensor, sums: Tensor, target: Tensor) -> Tensor:
    """[R] int64: the first place of chunks [R, C, S] whose running sum exceeds ``target`` [R], by chunk, then within.

    Args:
        sums: [R, C] float64, running sums of whole chunks.
    """
    chunk = (sums <= target[:, None]).sum(-1).clamp_(max=chunks.shape[1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, chunk[:, None])[:, 0]
    inner = _take_chunk(chunks, chunk).cumsum(-1, dtype=torch.float64)
    # The chunk's own sum was rounded to float32: stay below the sum of its numbers.
    rest = _below(target - before, inner[:, -1])
    return chunk * chunks.shape[2] + (inner <= rest[:, None]).sum(-1).clamp_(max=chunks.shape[2] - 1)


def _below(value: Tensor, limit: Tensor) -> Tensor:
    """``value``, but less than ``limit``, which rounding may have reached."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))


def _row_sums(x: Tensor) -> Tensor:
    """[R] float64 sums of non-negative rows."""
    return _chunks(x, 0.0).sum(-1).cumsum(-1, dtype=torch.float64)[:, -1]


def _take_chunk(chunks: Tensor, chunk: Tensor) -> Tensor:
    """[R, S]: chunk ``chunk[r]`` of row r."""
    return chunks[torch.arange(len(chunk), device=chunk.device), chunk]


def _chunks(x: Tensor, fill: float) -> Tensor:
    """x [R, V] as [R, C, S]: a view where S = 256, 128 or 64 divides V, else a padded copy."""
    size = x.shape[1]
    for chunk in (_CHUNK, _CHUNK // 2, _CHUNK // 4):
        if size % chunk == 0:
            return x.view(x.shape[0], size // chunk, chunk)
    padded = torch.nn.functional.pad(x, (0, -size % _CHUNK), value=fill)
    return padded.view(x.shape[0], -1, _CHUNK)

"""Requests that arrive together with the same beginning: one computes it, the others wait and share it.

One that does not wait computes the same tokens beside the other one, so its prompt is done sooner than by waiting by
about one step at most: the one that it joins after the shared tokens are there. Hence it waits if computing them costs
more than such a step, by the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from headrace.core.cost_model import CostModel
from headrace.core.request import Request, RequestStatus

MIN_SAVED_TOKENS = 64
"""Until the cost model knows better, a request waits only if that spares it so many tokens."""

SAVED_TOKENS_BOUNDS = (16, 2048)
"""Fewer than the first are never worth a wait, the second always are, whatever the fit says."""

_PROBE_TOKENS = 64

_COMPUTING = (RequestStatus.RUNNING, RequestStatus.PREPARING)  # preparing: a cache tier fills its blocks


def least_saved_tokens(cost_model: CostModel) -> int:
    """How many tokens waiting must spare a request."""
    known = cost_model.tokens_worth_a_step()
    if known is None:
        return MIN_SAVED_TOKENS
    low, high = SAVED_TOKENS_BOUNDS
    return math.ceil(min(max(known, low), high))


def computing_prefix_of(
    request: Request, num_cached_tokens: int, running: Iterable[Request], cost_model: CostModel
) -> Callable[[Request], bool] | None:
    """The test that says when ``request`` should start, if a running request is computing a beginning of its prompt
    beyond what the cache holds; None if it has nothing to wait for.

    It waits until the shared tokens are committed, or until the other request stops running. ``running`` may name
    requests whose blocks are being loaded, too.
    """
    least, limit = least_saved_tokens(cost_model), request.max_cached_tokens
    if limit - num_cached_tokens < least:
        return None
    probe = slice(num_cached_tokens, num_cached_tokens + min(least, _PROBE_TOKENS))
    first_saved = request.token_ids[probe]
    for other in running:
        if other.num_committed_tokens >= other.num_prompt_tokens or other.namespace != request.namespace:
            continue
        if (
            other.token_ids[probe] != first_saved
        ):  # most differ here; whole beginnings are compared for the others
            continue
        shared = min(_common_prefix(request.token_ids, other.token_ids), limit, other.num_prompt_tokens)
        if shared - num_cached_tokens >= least and other.num_committed_tokens < shared:
            return _ready_when(other, shared)
    return None


def _ready_when(other: Request, num_tokens: int) -> Callable[[Request], bool]:
    def is_ready(request: Request) -> bool:
        return other.status not in _COMPUTING or other.num_committed_tokens >= num_tokens

    return is_ready


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common beginning, by bisection over slices that compare at C speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

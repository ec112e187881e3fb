"""What happens to a request's blocks as its tokens are committed."""

from __future__ import annotations

from array import array

from headrace.core.kv_request import NEVER, RequestBlocks
from headrace.core.prefix_match import first_block_needed
from headrace.core.radix_cache import RadixCache
from headrace.core.request import Request

ANSWER_RUN_BLOCKS = 4


class BlockCommitter:
    """Full blocks of committed tokens enter the radix tree; sliding blocks behind the window leave the request.

    A prompt's blocks are shared at once. An answer's, which hardly anyone can want before it is finished, are shared
    in runs of ``ANSWER_RUN_BLOCKS``, and when the request is freed. What is due, and when, is precomputed as
    ``RequestBlocks.wake_tokens``.
    """

    def __init__(self, cache: RadixCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._groups_by_window: dict[int, list[int]] = {}
        for group, window in cache.windows.items():
            self._groups_by_window.setdefault(window, []).append(group)

    def start(self, request: Request, held: RequestBlocks) -> None:
        """A request begins with ``num_committed_tokens`` tokens, to which it may be rolled back."""
        for window in self._groups_by_window:
            held.first_kept[window] = first_block_needed(
                request.num_committed_tokens, window, self._block_size
            )
        self._set_alarm(request, held)

    def commit(self, request: Request, held: RequestBlocks) -> None:
        """Do what ``num_committed_tokens`` makes due."""
        self.share(request, held)
        if self._groups_by_window:
            self._release_behind_windows(request, held)
        self._set_alarm(request, held)

    def share(self, request: Request, held: RequestBlocks) -> None:
        """Put all full blocks of committed tokens into the tree."""
        size, start, end = (
            self._block_size,
            held.num_inserted,
            request.num_committed_tokens // self._block_size,
        )
        if held.node is not None and end > start:
            tokens = array("I", request.token_ids[start * size : end * size]).tobytes()
            blocks = [table[start:end] for table in request.block_table]
            held.node = self._cache.insert(held.node, tokens, blocks)
            if held.num_same == start:
                held.num_same += self._cache.num_same(held.node, blocks)
            held.num_inserted = end

    def _release_behind_windows(self, request: Request, held: RequestBlocks) -> None:
        for window, groups in self._groups_by_window.items():
            start = held.first_kept[window]
            end = first_block_needed(request.num_committed_tokens, window, self._block_size)
            if end > start:
                held.first_kept[window] = end
                ids: list[int] = []
                for group in groups:
                    table = request.block_table[group]
                    ids += table[start:end]
                    table[start:end] = [-1] * (end - start)
                self._cache.pool.decref(ids, request.last_step_id)
                self._cache.release(ids)

    def _set_alarm(self, request: Request, held: RequestBlocks) -> None:
        wake = NEVER
        if held.node is not None:
            wake = (held.num_inserted + 1) * self._block_size
            if wake > request.num_prompt_tokens:
                wake += (ANSWER_RUN_BLOCKS - 1) * self._block_size
        for window, first in held.first_kept.items():
            wake = min(wake, (first + 1) * self._block_size + window - 1)
        held.wake_tokens = wake

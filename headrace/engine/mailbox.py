"""Mailbox: outputs of one or several requests on their way to one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.outputs import CompletionOutput, RequestOutput


class Mailbox:
    """A reader that falls behind finds one merged output a request, so a slow one costs no more than its text.

    Requests are told apart by their index in the batch. Close it when the reader leaves: what still runs is aborted.

    Args:
        num_requests: requests whose outputs come here.
        is_delta: outputs hold new parts (they are joined); else each replaces the one before.
        on_close: called once with nothing left to read, or when the reader leaves early.
    """

    def __init__(self, num_requests: int, is_delta: bool, on_close: Callable[[], None]) -> None:
        self._is_delta = is_delta
        self._on_close = on_close
        self._num_unfinished = num_requests
        self._pending: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    @property
    def is_done(self) -> bool:
        """True when the reader has everything."""
        return self._num_unfinished == 0 and not self._pending

    def put(self, index: int, output: RequestOutput) -> None:
        """Add an output."""
        pending = self._pending.get(index)
        if pending is not None and self._is_delta:
            _prepend(pending, output)
        self._pending[index] = output
        if output.finished:
            self._num_unfinished -= 1
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more comes; the reader gets ``error`` once it has read what came before."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> list[tuple[int, RequestOutput]]:
        """What has come since the last call, at least one output; [] when all requests are finished.

        Raises: the error of a request that failed before it had an output, or of an engine that died.
        """
        if not self._pending and self._num_unfinished and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pending:
            pending, self._pending = self._pending, {}
            return list(pending.items())
        if self._error is not None:
            raise self._error
        return []

    def close(self) -> None:
        """The reader leaves. Calling twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _prepend(older: RequestOutput, newer: RequestOutput) -> None:
    """Put the parts of an unread output before those of the next one of its request."""
    parts = {answer.index: answer for answer in older.outputs}
    for answer in newer.outputs:
        part = parts.get(answer.index)
        if part is not None:
            _prepend_part(part, answer)
        parts[answer.index] = answer
    newer.outputs = list(parts.values())
    if older.prompt_logprobs is not None:
        newer.prompt_logprobs = older.prompt_logprobs


def _prepend_part(older: CompletionOutput, newer: CompletionOutput) -> None:
    newer.text = older.text + newer.text
    newer.token_ids = older.token_ids + newer.token_ids
    if older.logprobs is not None:
        newer.logprobs = older.logprobs + (newer.logprobs or [])

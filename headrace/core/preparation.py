"""Requests that wait for something other than memory: a sibling's prompt, a grammar, blocks from a cache tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.core.interfaces import CacheTier
from headrace.core.request import Request, RequestStatus

IsReady = Callable[[Request], bool]


class Preparation:
    """The PREPARING requests, each with a test that says when it may go on."""

    def __init__(self) -> None:
        self._held: dict[Request, IsReady] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held)

    def hold(self, request: Request, is_ready: IsReady, now: float, cause: str) -> None:
        """Keep a request until ``is_ready(request)``; asked once a step."""
        self._held[request] = is_ready
        request.move_to(RequestStatus.PREPARING, now, cause)

    def remove(self, request: Request) -> None:
        """Forget a request (it was cancelled)."""
        self._held.pop(request, None)

    def take_ready(self) -> list[Request]:
        """Requests that may go on, in the order they came; they are held no longer."""
        if not self._held:
            return []
        ready = [request for request, is_ready in self._held.items() if is_ready(request)]
        for request in ready:
            del self._held[request]
        return ready


class TierLoads:
    """Loads of KV blocks from a cache tier: the request holds its blocks and waits until they are filled.

    Args:
        tier: None has nothing to load.
    """

    def __init__(self, tier: CacheTier | None) -> None:
        self._tier = tier
        self._bases: dict[str, tuple[Request, int]] = {}
        self._loaded: dict[str, int] = {}

    def match(self, request: Request, num_cached_tokens: int) -> tuple[int, bool]:
        """(tokens that the tier can add after ``num_cached_tokens``, is the load asynchronous), within the limit."""
        if self._tier is None:
            return 0, False
        found, is_async = self._tier.match(request, num_cached_tokens)
        return min(found, request.max_cached_tokens - num_cached_tokens), is_async

    def start(self, request: Request, base: int, num_tokens: int, is_async: bool) -> IsReady | None:
        """Begin to load tokens [base, base + num_tokens), as many as ``match`` found.

        Returns: the test that says when the request may go on; None if it may at once.
        """
        if self._tier is None or not num_tokens:
            return None
        self._bases[request.request_id] = (request, base)
        self._tier.start_load(request, base, num_tokens)
        if is_async:
            return self.is_loaded
        self.poll()
        self.is_loaded(request)
        return None

    def poll(self) -> None:
        """Hear of loads that ended, and forget those whose request was cancelled. Called once a step."""
        if self._tier is None:
            return
        self._loaded.update(self._tier.poll_loaded())
        for name in [
            name for name in self._loaded if name not in self._bases or self._bases[name][0].is_finished
        ]:
            self._bases.pop(name, None)
            del self._loaded[name]

    @property
    def is_waiting(self) -> bool:
        """True while a load goes on."""
        return bool(self._bases)

    def is_loaded(self, request: Request) -> bool:
        """True once the load ended; sets how far the request's KV has got (no further, if the load failed)."""
        if request.request_id not in self._loaded:
            return False
        done = self._bases.pop(request.request_id)[1] + self._loaded.pop(request.request_id)
        request.num_computed_tokens = request.num_committed_tokens = request.num_cached_tokens = done
        return True

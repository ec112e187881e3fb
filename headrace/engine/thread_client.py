"""ThreadClient: an engine core in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque

from headrace.core.output import EngineCoreRequest
from headrace.engine.client import EngineCoreClient, EngineListener
from headrace.engine.core_loop import IDLE_LOOK_S, CoreLoop
from headrace.engine.messages import (
    AbortChild,
    AbortRequests,
    AddRequest,
    CacheCall,
    CoreFailed,
    CoreSpec,
    FromCore,
    StopCore,
    ToCore,
    UpdateWeights,
)


class QueueInbox:
    """Messages from a thread-safe queue."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToCore] = queue.SimpleQueue()

    def put(self, message: ToCore) -> None:
        """Add a message."""
        self._queue.put(message)

    def get(self, block: bool) -> ToCore | None:
        """The next message, or None when none waits; with ``block``, when none comes for a while."""
        try:
            return self._queue.get(block=block, timeout=IDLE_LOOK_S)
        except queue.Empty:
            return None


class ThreadClient(EngineCoreClient):
    """Runs the core in a daemon thread: no second process, but the core's Python shares this interpreter's lock."""

    def __init__(self, spec: CoreSpec) -> None:
        super().__init__()
        self._inbox = QueueInbox()
        self._unheard: deque[FromCore] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=CoreLoop(self._inbox, self._send).run, args=(spec,), name="engine-core", daemon=True
        )
        self._thread.start()

    def listen(self, listener: EngineListener) -> None:
        """Deliver news on the running event loop."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._drain)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over a checked request."""
        self.check_alive()
        self._inbox.put(AddRequest(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests."""
        self._inbox.put(AbortRequests(request_ids))

    def abort_child(self, request_id: str, child_index: int) -> None:
        """End one answer of a request."""
        self._inbox.put(AbortChild(request_id, child_index))

    def call(self, call: CacheCall | UpdateWeights) -> None:
        """Ask something of the core."""
        self.check_alive()
        self._inbox.put(call)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Tell the core to stop and wait for it; a thread that hangs is left to the process's end."""
        if not self._is_stopping:
            self._is_stopping = True
            self._inbox.put(StopCore())
            self._thread.join(timeout_s)

    def _send(self, message: FromCore) -> None:
        """Called by the core's thread."""
        self._unheard.append(message)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        while self._unheard:
            message = self._unheard.popleft()
            self._deliver(message)
            if isinstance(message, CoreFailed):
                return

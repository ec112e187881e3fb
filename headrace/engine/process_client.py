"""ProcessClient: an engine core in a process of its own, over ZeroMQ. The parent imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.output import EngineCoreRequest
from headrace.engine.client import EngineCoreClient, EngineListener
from headrace.engine.messages import (
    AbortChild,
    AbortRequests,
    AddRequest,
    CacheCall,
    CoreSpec,
    FromCore,
    StopCore,
    ToCore,
    UpdateWeights,
)
from headrace.errors import EngineDeadError
from headrace.observe.process_end import describe_end

if TYPE_CHECKING:
    import zmq

_MAX_MESSAGES_AT_ONCE = 16
_LAST_WORDS_S = 0.5
_RECONNECT_MS = 10


class ProcessClient(EngineCoreClient):
    """Starts the core's process in its constructor, before anything slow is imported here.

    The process's standard input is its lifeline: it closes with this process, however that ends.
    """

    def __init__(self, spec: CoreSpec) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix="headrace-")
        level = max(
            logging.INFO, logging.getLogger().getEffectiveLevel()
        )  # INFO only where this process shows it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.engine.core_proc", self._folder, str(level)],
            stdin=subprocess.PIPE,
            stdout=2,  # an answer printed by this process must not mix with the engine's messages
            env={
                "OMP_WAIT_POLICY": "passive",
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        self._finalizer = weakref.finalize(self, _clean_up, self._process, self._folder)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._context, self._outbox, self._inbox = _bind(self._folder)
        self._send(spec)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int:
        """The core's process id."""
        return self._process.pid

    def listen(self, listener: EngineListener) -> None:
        """Deliver news on the running event loop."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.FD, self._receive)
        self._loop.call_soon(self._receive)
        threading.Thread(target=self._await_end, name="engine-watch", daemon=True).start()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over a checked request."""
        self.check_alive()
        self._send(AddRequest(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests."""
        if self._death is None:
            self._send(AbortRequests(request_ids))

    def abort_child(self, request_id: str, child_index: int) -> None:
        """End one answer of a request."""
        if self._death is None:
            self._send(AbortChild(request_id, child_index))

    def call(self, call: CacheCall | UpdateWeights) -> None:
        """Ask something of the core."""
        self.check_alive()
        self._send(call)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Tell the core to stop; kill it after ``timeout_s``."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._process.poll() is None:
            self._send(StopCore())
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._close_sockets()
        self._finalizer()

    def _send(self, message: ToCore | CoreSpec) -> None:
        import zmq

        with contextlib.suppress(zmq.Again):  # the core is gone, which is told elsewhere
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Take what the core sent. ZeroMQ's descriptor only tells of the first message, so read until none is left;
        but let the loop write to clients in between, or a fast core would starve them."""
        import zmq

        for _ in range(_MAX_MESSAGES_AT_ONCE):
            if self._inbox.closed:
                return
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(self._decoder.decode(data))
        assert self._loop is not None
        self._loop.call_soon(self._receive)

    def _await_end(self) -> None:
        """Runs in a thread of its own: waits for the process's end and reports it on the event loop."""
        code = self._process.wait()
        loop = self._loop
        assert loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            # What the core sent before it ended explains more than its exit status: let that arrive first.
            loop.call_soon_threadsafe(
                loop.call_later,
                _LAST_WORDS_S,
                self._die,
                EngineDeadError(f"the engine process {describe_end(code)}"),
            )
            loop.call_soon_threadsafe(self._receive)

    def _close_sockets(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and not self._inbox.closed:
            self._loop.remove_reader(self._inbox.FD)
        self._outbox.close(0)
        self._inbox.close(0)
        self._context.term()


def _bind(folder: str) -> tuple[zmq.Context[Any], zmq.Socket[bytes], zmq.Socket[bytes]]:
    """(context, PUSH to the core, PULL from it). Messages queue without limit: a step never waits for a reader.

    A socket queues from the moment it connects, even if the other side binds later; so each sender connects.
    """
    import zmq

    from headrace.engine.core_proc import FROM_CORE, TO_CORE, endpoint

    context: zmq.Context[Any] = zmq.Context()
    outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    outbox.set_hwm(0)
    outbox.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    outbox.connect(endpoint(folder, TO_CORE))
    inbox.set_hwm(0)
    inbox.bind(endpoint(folder, FROM_CORE))
    return context, outbox, inbox


def _clean_up(process: subprocess.Popen[bytes], folder: str) -> None:
    if process.poll() is None:
        process.kill()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
    shutil.rmtree(Path(folder), ignore_errors=True)

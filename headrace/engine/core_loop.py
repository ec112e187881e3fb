"""CoreLoop: drives an engine core from an inbox of messages. The same in a process of its own and in a thread."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from headrace.core.output import EngineCoreOutput, EngineCoreRequest
from headrace.engine.messages import (
    AbortChild,
    AbortRequests,
    AddRequest,
    CacheCall,
    CallReply,
    CoreFailed,
    CoreReady,
    CoreSpec,
    FromCore,
    LoadProgress,
    Refusal,
    StepNews,
    ToCore,
    UpdateWeights,
)
from headrace.engine.output_pace import OutputPace
from headrace.engine.settled_start import settle
from headrace.errors import EngineDeadError, HeadraceError, RequestError

logger = logging.getLogger(__name__)

IDLE_LOOK_S = 1
"""How often an idle core is asked whether it is well."""

STATS_EVERY_S = 0.05
"""How often a busy core tells its state: gathering and sending it takes longer than a request's news."""


class Core(Protocol):
    """What the loop needs of an engine core."""

    @property
    def stream_interval(self) -> int | None:
        """Steps whose tokens go out together; None: as ``OutputPace`` finds."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request. Raises RequestError, which ends that request alone."""

    def abort_requests(self, request_ids: list[str]) -> Any:
        """Stop requests; unknown ids are ignored."""

    def abort_child(self, request_id: str, child_index: int) -> Any:
        """End one answer of a request."""

    def call_cache(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ask something of the prefix cache. Raises RequestError."""

    def update_weights(self, model: str | None) -> None:
        """Replace the weights. Raises EngineDeadError when it ended the core, another HeadraceError when refused."""

    def step(self) -> list[EngineCoreOutput]:
        """Do one step; returns its news."""

    def has_work(self) -> bool:
        """False when ``step`` would do nothing."""

    def use_idle_time(self) -> bool:
        """Without work: do a piece, of some milliseconds, of what can be done ahead of it; False when all is done."""

    def stats(self) -> Any:
        """Gauges and counters, encodable by msgspec."""

    def shutdown(self) -> None:
        """Free the device."""


class Inbox(Protocol):
    """Messages from the client, in order."""

    def get(self, block: bool) -> ToCore | None:
        """The next message; None when there is none. ``block`` waits for one, up to ``IDLE_LOOK_S``."""


class CoreLoop:
    """Builds a core, says how loading goes, and then turns messages into steps until told to stop.

    Args:
        owns_process: nothing else runs in this process.
    """

    def __init__(self, inbox: Inbox, send: Callable[[FromCore], None], *, owns_process: bool = False) -> None:
        self._owns_process = owns_process
        self._told: dict[str, Any] = {}  # the state that was sent last
        self._pace = OutputPace(1)
        self._inbox = inbox
        self._send = send

    def run(self, spec: CoreSpec) -> bool:
        """Load and serve until ``StopCore``. An error that escapes the core is sent as ``CoreFailed``.

        Returns: False if the core failed.
        """
        core: Core | None = None
        try:
            core = self._load(spec)
            self._pace = OutputPace(core.stream_interval)
            self._serve(core)
            return True
        except Exception as error:
            if not isinstance(error, HeadraceError):  # a fault of ours: the error alone would not say where
                logger.exception("the engine failed")
            if held := self._pace.flush():  # computed before it failed
                self._send(StepNews(held))
            self._send(CoreFailed(type(error).__name__, str(error)))
            return False
        finally:
            if core is not None:
                core.shutdown()

    def _load(self, spec: CoreSpec) -> Core:
        start = time.monotonic()
        self._send(LoadProgress("starting the engine"))
        module, _, name = spec.factory.partition(":")
        core: Core = getattr(importlib.import_module(module), name)(
            spec.config, progress=self._report, **spec.options
        )
        if self._owns_process:
            settle(core)
        self._send(CoreReady(time.monotonic() - start, stats_of(core)))
        return core

    def _report(self, stage: str, share: float) -> None:
        self._send(LoadProgress(stage, share))

    def _serve(self, core: Core) -> None:
        next_stats = 0.0
        step_tokens: list[int] = []
        while self._take_messages(core):
            news = core.step()
            if num_tokens := sum(len(item.new_token_ids) for item in news):
                step_tokens.append(num_tokens)
            outputs = self._pace.take(news)
            is_idle = not core.has_work()
            is_due = is_idle or time.monotonic() >= next_stats
            if is_due:
                self._told, next_stats = stats_of(core), time.monotonic() + STATS_EVERY_S
            if outputs or is_due:
                self._send(StepNews(outputs, self._told if is_due else None, step_tokens))
                step_tokens = []

    def _take_messages(self, core: Core) -> bool:
        """Handle what waits; without work, do what can be done ahead of it, then wait. Returns False when told to stop.

        A core without work still takes a step every now and then, which tells whether it is well; pins and transfers
        of cache tiers end by it.
        """
        while True:
            is_idle = not core.has_work()
            has_chores = is_idle and core.use_idle_time()
            message = self._inbox.get(block=is_idle and not has_chores)
            if message is None:
                if not is_idle:
                    return True
                if not has_chores:
                    core.step()
                    self._tell_changes(core)
            elif isinstance(message, AddRequest):
                self._add(core, message.request)
            elif isinstance(message, AbortRequests):
                core.abort_requests(message.request_ids)
                self._tell_if_idle(core)
            elif isinstance(message, AbortChild):
                core.abort_child(message.request_id, message.child_index)
                self._tell_if_idle(core)
            elif isinstance(message, CacheCall | UpdateWeights):
                self._answer(core, message)
            else:
                return False

    def _tell_if_idle(self, core: Core) -> None:
        """After an abort there may be no step any more that would report the gauges."""
        if not core.has_work():
            self._tell_changes(core)

    def _tell_changes(self, core: Core) -> None:
        stats = stats_of(core)
        if stats != self._told:
            self._told = stats
            self._send(StepNews([], stats))

    def _answer(self, core: Core, call: CacheCall | UpdateWeights) -> None:
        """Do what is asked, and tell; the engine's end is no answer."""
        result: dict[str, Any] = {}
        try:
            if isinstance(call, CacheCall):
                result = core.call_cache(call.action, call.arguments)
            else:
                core.update_weights(call.model)
        except EngineDeadError:
            raise
        except HeadraceError as error:
            param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
            self._send(CallReply(call.call_id, {}, type(error).__name__, str(error), param, code))
        else:
            self._tell_changes(core)  # first: whoever has the reply finds its effect in the gauges
            self._send(CallReply(call.call_id, result))

    def _add(self, core: Core, request: EngineCoreRequest) -> None:
        if held := self._pace.flush():  # its prompt may make the next step a long one
            self._send(StepNews(held))
        try:
            core.add_request(request)
            self._pace.expect(request)
        except RequestError as error:
            self._send(
                Refusal(request.request_id, type(error).__name__, error.message, error.param, error.code)
            )


def stats_of(core: Core) -> dict[str, Any]:
    """The core's ``stats()`` as plain values that travel."""
    stats = msgspec.to_builtins(core.stats())
    assert isinstance(stats, dict)
    return stats

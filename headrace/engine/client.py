"""EngineCoreClient: how the API side reaches an engine core, wherever that runs."""

from __future__ import annotations

import abc
from typing import Protocol

from headrace import errors
from headrace.core.output import EngineCoreRequest
from headrace.engine.messages import (
    CacheCall,
    CallReply,
    CoreFailed,
    CoreReady,
    FromCore,
    LoadProgress,
    Refusal,
    StepNews,
    UpdateWeights,
)
from headrace.errors import EngineDeadError, HeadraceError


class EngineListener(Protocol):
    """Who hears of an engine core. All methods run on the event loop and must not block."""

    def on_progress(self, progress: LoadProgress) -> None:
        """Loading went on."""

    def on_ready(self, ready: CoreReady) -> None:
        """The core takes steps now."""

    def on_step(self, news: StepNews) -> None:
        """One step's outputs and the state after it."""

    def on_refusal(self, refusal: Refusal) -> None:
        """A request was not taken."""

    def on_call_reply(self, reply: CallReply) -> None:
        """The answer to a call."""

    def on_death(self, error: HeadraceError) -> None:
        """The core ended without being told to. Comes once; nothing comes after it."""


class EngineCoreClient(abc.ABC):
    """One engine core in another process or thread.

    Building the client starts the core loading at once; ``listen`` then delivers what it says on the running event
    loop. Requests may be added before the core is ready: it takes them up once it is. No method blocks.
    """

    def __init__(self) -> None:
        self._listener: EngineListener | None = None
        self._death: HeadraceError | None = None
        self._is_stopping = False

    @abc.abstractmethod
    def listen(self, listener: EngineListener) -> None:
        """Deliver news to ``listener`` on the running event loop from now on. Call once."""

    @abc.abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over a checked request. Raises EngineDeadError once the core is gone."""

    @abc.abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests; unknown and finished ids are ignored."""

    @abc.abstractmethod
    def abort_child(self, request_id: str, child_index: int) -> None:
        """End one answer of a request, whose text met a stop string."""

    @abc.abstractmethod
    def call(self, call: CacheCall | UpdateWeights) -> None:
        """Ask something of the core; the listener hears the reply. Raises EngineDeadError."""

    @abc.abstractmethod
    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the core, by force after ``timeout_s``. Calling twice is allowed."""

    def check_alive(self) -> None:
        """Raises EngineDeadError, or the error that ended loading, once the core is gone."""
        if self._death is not None:
            raise self._death

    def _deliver(self, message: FromCore) -> None:
        listener = self._listener
        if listener is None or self._death is not None:
            return
        if isinstance(message, StepNews):
            listener.on_step(message)
        elif isinstance(message, Refusal):
            listener.on_refusal(message)
        elif isinstance(message, CallReply):
            listener.on_call_reply(message)
        elif isinstance(message, LoadProgress):
            listener.on_progress(message)
        elif isinstance(message, CoreReady):
            listener.on_ready(message)
        else:
            self._die(failure_of(message))

    def _die(self, error: HeadraceError) -> None:
        if self._death is None and not self._is_stopping:
            self._death = error
            if self._listener is not None:
                self._listener.on_death(error)


def failure_of(message: CoreFailed) -> HeadraceError:
    """The error that a core's last words describe: a user's mistake keeps its class, the rest is EngineDeadError."""
    kind = errors.error_class(message.kind)
    if kind is not None:
        return kind(message.message)
    return EngineDeadError(f"the engine stopped on {message.kind}: {message.message}")


def refusal_error(refusal: Refusal | CallReply) -> HeadraceError:
    """The typed error of what was refused."""
    kind = errors.error_class(refusal.kind or "") or errors.RequestError
    if issubclass(kind, errors.RequestError):
        return kind(refusal.message, param=refusal.param, code=refusal.code)
    return kind(refusal.message)

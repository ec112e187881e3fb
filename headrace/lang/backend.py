"""Backend: where programs run. ``GenSpec`` and ``Generated`` are what goes in and comes out."""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from headrace.lang.conversation import Conversation

T = TypeVar("T")


@dataclass(frozen=True)
class GenSpec:
    """How text is generated. ``constraint``: one of regex, json, choice with its value, or empty."""

    max_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    constraint: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The sampling fields, under the names that they have everywhere."""
        given: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.stop:
            given["stop"] = list(self.stop)
        if self.seed is not None:
            given["seed"] = self.seed
        return given


@dataclass(frozen=True)
class Generated:
    """What the model wrote, and why it ended ("stop", "length")."""

    text: str
    finish_reason: str
    num_tokens: int | None = None


class Backend(abc.ABC):
    """A model. Its coroutines run on an event loop of its own; programs run in threads of their own.

    is_exact: select is by log-probability, and everything works in the middle of a turn. Where it is False, the class
        says what is different.
    """

    is_exact = True

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-lang", daemon=True)
        self._thread.start()

    @abc.abstractmethod
    async def generate(
        self, conversation: Conversation, spec: GenSpec, on_text: Callable[[str], None] | None = None
    ) -> Generated:
        """Go on with a conversation; ``on_text`` is told each piece as it comes. Raises RequestError."""

    @abc.abstractmethod
    async def score(self, conversation: Conversation, choices: Sequence[str]) -> list[float]:
        """A score for each choice as what comes next, the higher the likelier: its mean log-probability per token."""

    @abc.abstractmethod
    async def warm(self, conversation: Conversation) -> None:
        """Have the beginning that conversations will share computed and cached."""

    @abc.abstractmethod
    async def close_model(self) -> None:
        """Let go of the model."""

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the backend's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def shutdown(self) -> None:
        """End it. Calling twice is allowed."""
        if self._loop.is_closed():
            return
        self.submit(self.close_model()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

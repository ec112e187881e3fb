"""ChatSession: one conversation with a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.cli.streaming import parse_chat, require_chat, text_parts, wait_loaded
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM


class ChatSession:
    """Keeps the messages and asks for answers.

    Args:
        llm: an engine that has begun to load.
        system: the system message, or None.
    """

    def __init__(self, llm: AsyncLLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self.messages: list[dict[str, str]] = []
        self.set_system(system)

    async def load(self, progress: Callable[[str, float], None]) -> None:
        """Wait for the engine.

        Raises: CheckpointError, ConfigError, EngineDeadError; RequestError for a model that cannot chat.
        """
        await wait_loaded(self._llm, progress)
        await require_chat(self._llm)

    async def close(self) -> None:
        """End the engine."""
        await self._llm.shutdown()

    def set_system(self, text: str | None) -> None:
        """Start over with another system message."""
        self._system = text
        self.clear()

    def clear(self) -> None:
        """Start over."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def say(self, text: str) -> None:
        """Add the user's message."""
        self.messages.append({"role": "user", "content": text})

    def take_back(self) -> None:
        """Drop a message that could not be answered."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def retry(self) -> None:
        """Drop the last answer. Raises RequestError if nothing was said yet."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise RequestError("there is no message to answer again")

    async def answer(self, show: Callable[[str], None]) -> None:
        """Stream the answer to the messages so far. What was shown of it stays in the conversation if it is cancelled.

        Raises: RequestError (the conversation no longer fits, say), EngineDeadError.
        """
        prompt = await parse_chat(self._llm, self.messages)
        said = ""
        try:
            async with contextlib.aclosing(text_parts(self._llm, prompt, self._params)) as parts:
                async for part in parts:
                    said += part
                    show(part)
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})

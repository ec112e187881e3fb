"""Conversation: what a program has said so far: plain text, or messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.errors import RequestError


@dataclass(frozen=True)
class Conversation:
    """Immutable, so that forks share it.

    text: of a program without roles.
    messages: (role, content) pairs of one with roles; the last is open while its turn lasts.
    """

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    is_open: bool = False

    def begin(self, role: str) -> Conversation:
        """Open a message. Raises RequestError behind plain text."""
        if self.text:
            raise RequestError(
                "roles cannot follow plain text: put all text into system(), user() and assistant()"
            )
        return replace(self, messages=(*self.messages, (role, "")), is_open=True)

    def append(self, text: str) -> Conversation:
        """Add text to what is open. Raises RequestError between two messages."""
        if self.is_open:
            role, content = self.messages[-1]
            return replace(self, messages=(*self.messages[:-1], (role, content + text)))
        if self.messages:
            raise RequestError(
                "text between messages belongs to no role: put it into system(), user() or assistant()"
            )
        return replace(self, text=self.text + text)

    def end(self) -> Conversation:
        """Close the open message."""
        return replace(self, is_open=False)

    @property
    def has_begun_turn(self) -> bool:
        """True when the open message has text already."""
        return self.is_open and bool(self.messages[-1][1])

    @property
    def prompt_messages(self) -> list[dict[str, str]]:
        """The messages that the model reads; an open one without text is the one it will begin."""
        kept = self.messages[:-1] if self.is_open and not self.has_begun_turn else self.messages
        return [{"role": role, "content": content} for role, content in kept]

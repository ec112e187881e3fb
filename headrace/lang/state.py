"""State: one run of a program: its conversation and variables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headrace.errors import RequestError
from headrace.lang.backend import Backend
from headrace.lang.conversation import Conversation
from headrace.lang.pieces import Gen, Piece, Select, Text, Turn, flatten

OnText = Callable[[str, str], None]


class State:
    """What is added to it runs in order, in the background; reading a variable waits for it.

    Forks go on by themselves from here and share what was computed before them. An error in a piece ends its state:
    it is raised by whatever reads the state next.

    Args:
        on_text: told (variable, piece of its text) as the model writes.
    """

    def __init__(self, backend: Backend, on_text: OnText | None = None) -> None:
        self._backend = backend
        self._on_text = on_text
        self._conversation = Conversation()
        self._start_length = 0
        self._variables: dict[str, Any] = {}
        self._meta: dict[str, dict[str, Any]] = {}
        self._tail: Future[None] | None = None

    # ---- writing

    def __iadd__(self, piece: Piece | str) -> State:
        """Add text, ``gen``, ``select`` or a message."""
        for part in flatten(piece):
            self._follow(self._add(part))
        return self

    def fork(self, num_forks: int) -> list[State]:
        """So many states that go on from here, at the same time."""
        if num_forks < 1:
            raise RequestError(f"fork needs at least 1 state; got {num_forks}")
        forks = [State(self._backend) for _ in range(num_forks)]
        self._follow(self._hand_over(forks))
        for other in forks:
            other._tail = self._tail
        return forks

    def join(self, forks: Sequence[State], append: bool = False) -> list[dict[str, Any]]:
        """Wait for forks; their variables, in their order.

        Args:
            append: add what they wrote to this state, one behind the other. For programs without roles.

        Raises: the error that ended one of them; RequestError for messages that cannot be appended.
        """
        for other in forks:
            other.wait()
        if append:
            if any(state._conversation.messages for state in (self, *forks)):
                raise RequestError(
                    "join(append=True) is for programs without roles: add the forks' variables yourself"
                )
            for other in forks:
                self += other._conversation.text[other._start_length :]
        return [dict(other._variables) for other in forks]

    def set(self, name: str, value: Any) -> None:
        """Set a variable, a tool's result say."""
        self.wait()
        self._variables[name] = value

    # ---- reading

    def wait(self) -> None:
        """Wait for all that was added. Raises the error that ended it."""
        if self._tail is not None:
            self._tail.result()

    def __getitem__(self, name: str) -> Any:
        """A variable. Raises RequestError for one that was never set."""
        self.wait()
        if name not in self._variables:
            known = ", ".join(self._variables) or "none"
            raise RequestError(f"there is no variable {name!r} (there: {known})")
        return self._variables[name]

    def __contains__(self, name: str) -> bool:
        self.wait()
        return name in self._variables

    @property
    def variables(self) -> dict[str, Any]:
        """All variables."""
        self.wait()
        return dict(self._variables)

    def meta(self, name: str) -> dict[str, Any]:
        """How a variable came about: ``finish_reason`` and ``num_tokens`` of gen, ``scores`` of select."""
        self[name]
        return dict(self._meta.get(name, {}))

    @property
    def text(self) -> str:
        """All text so far; of a program with roles, each message with its role."""
        self.wait()
        if not self._conversation.messages:
            return self._conversation.text
        return "\n".join(f"{role}: {content}" for role, content in self._conversation.messages)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far."""
        self.wait()
        return [{"role": role, "content": content} for role, content in self._conversation.messages]

    # ---- running, on the backend's loop

    def _follow(self, work: Any) -> None:
        self._tail = self._backend.submit(self._after(self._tail, work))

    async def _after(self, previous: Future[None] | None, work: Any) -> None:
        if previous is not None:
            try:
                await asyncio.wrap_future(previous)
            except BaseException:
                work.close()
                raise
        await work

    async def _hand_over(self, forks: list[State]) -> None:
        """Give forks what there is at this point; what is added to this state later is not theirs."""
        for other in forks:
            other._conversation = self._conversation
            other._start_length = len(self._conversation.text)
            other._variables = dict(self._variables)
            other._meta = dict(self._meta)

    async def _add(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self._conversation = self._conversation.append(text)
            case Turn(role, parts):
                self._conversation = self._conversation.begin(role)
                for part in parts:
                    await self._add(part)
                self._conversation = self._conversation.end()
            case Gen():
                await self._generate(piece)
            case Select(name, choices):
                scores = await self._backend.score(self._conversation, choices)
                chosen = choices[max(range(len(choices)), key=scores.__getitem__)]
                self._meta[name] = {"scores": dict(zip(choices, scores, strict=True))}
                self._keep(name, chosen)
                if self._on_text is not None:
                    self._on_text(name, chosen)

    async def _generate(self, piece: Gen) -> None:
        tell, name = self._on_text, piece.name
        on_text = None if tell is None else (lambda text: tell(name, text))
        made = await self._backend.generate(self._conversation, piece.spec, on_text)
        self._meta[name] = {"finish_reason": made.finish_reason, "num_tokens": made.num_tokens}
        self._keep(name, made.text)

    def _keep(self, name: str, text: str) -> None:
        self._conversation = self._conversation.append(text)
        self._variables[name] = text

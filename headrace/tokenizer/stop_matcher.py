"""StopMatcher: finds the first stop string in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Aho and Corasick's automaton over the stop strings, one step a character.

    The match is the one that ends first and, of those, starts first: the text up to it is then the same however it
    is cut into pieces. ``depth`` is how many characters at the end may still begin a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[int] = [0]
        for stop in self._stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = following
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Each state's longest proper suffix that is a state too, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                fallback = self._fail[state]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[following] = self._next[fallback].get(char, 0)
                if not self._match[following]:
                    self._match[following] = self._match[self._fail[following]]
                queue.append(following)

    @property
    def depth(self) -> int:
        """How many of the last characters may belong to a stop string that is not complete."""
        return self._depth[self._state]

    def feed(self, text: str) -> tuple[int, int] | None:
        """Takes more text. On a match: (characters of ``text`` up to its end, the match's length in characters)."""
        state, transitions, fail = self._state, self._next, self._fail
        for index, char in enumerate(text):
            following = transitions[state].get(char)
            while following is None and state:
                state = fail[state]
                following = transitions[state].get(char)
            state = following or 0
            if state and self._match[state]:
                self._state = state
                return index + 1, self._match[state]
        self._state = state
        return None

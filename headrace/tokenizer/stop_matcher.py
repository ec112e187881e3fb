"""StopMatcher: finds the first stop string in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

_MAX_AUTOMATA = 16


class StopAutomaton:
    """Aho and Corasick's automaton over the stop strings: what all answers of a request share.

    By state, 0 being the start:

    next: {character: state}.
    fail: the longest proper suffix that is a state, too.
    depth: its length.
    match: the length of the stop string that ends here, or 0.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[int] = [0]
        for stop in stops:
            self._insert(stop)
        self.fail = [0] * len(self.next)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.next[state].get(char)
            if following is None:
                following = len(self.next)
                self.next[state][char] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
            state = following
        self.match[state] = len(stop)

    def _link(self) -> None:
        """Each state's longest proper suffix that is a state too, breadth first."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.next[state].items():
                fallback = self.fail[state]
                while fallback and char not in self.next[fallback]:
                    fallback = self.fail[fallback]
                self.fail[following] = self.next[fallback].get(char, 0)
                if not self.match[following]:
                    self.match[following] = self.match[self.fail[following]]
                queue.append(following)


_automaton = lru_cache(_MAX_AUTOMATA)(StopAutomaton)


class StopMatcher:
    """One answer's place in the automaton, one step a character.

    The match is the one that ends first and, of those, starts first: the text up to it is then the same however it
    is cut into pieces. ``depth`` is how many characters at the end may still begin a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stop for stop in stops if stop))
        self._state = 0

    @property
    def depth(self) -> int:
        """How many of the last characters may belong to a stop string that is not complete."""
        return self._automaton.depth[self._state]

    def feed(self, text: str) -> tuple[int, int] | None:
        """Takes more text. On a match: (characters of ``text`` up to its end, the match's length in characters)."""
        automaton = self._automaton
        state, transitions, fail, match = self._state, automaton.next, automaton.fail, automaton.match
        for index, char in enumerate(text):
            following = transitions[state].get(char)
            while following is None and state:
                state = fail[state]
                following = transitions[state].get(char)
            state = following or 0
            if state and match[state]:
                self._state = state
                return index + 1, match[state]
        self._state = state
        return None

"""The scoring side of beam search: which continuations go on, which are finished, and when to stop. No requests here.

Follows the rules of transformers' ``generate(num_beams=...)``, so that results are the same: of all continuations the
best ``width`` that do not end go on; one that ends counts only if it is among the best ``width`` of all; a finished
sequence's score is its log-probability divided by ``length ** length_penalty``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from headrace.core.output import TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """One sequence, as a link to the one it continues; None at the prompt.

    logprob: sum over its tokens.  entry: the log-probabilities from which its last token was chosen.
    """

    parent: Hypothesis | None
    token: int
    logprob: float
    length: int
    entry: TokenLogprobs

    def path(self) -> list[Hypothesis]:
        """Its tokens' links, first to last."""
        links: list[Hypothesis] = []
        link: Hypothesis | None = self
        while link is not None:
            links.append(link)
            link = link.parent
        return links[::-1]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: beam ``parent`` of this step with one token more."""

    parent: int
    hypothesis: Hypothesis


class BeamScores:
    """The search over one prompt's answers.

    Args:
        width: beams that go on.
        length_penalty: above 0 favours long answers, below 0 short ones.
        early_stopping: True stops at ``width`` finished answers; False when no running beam looks better than the
            worst of them at its present length; "never" when none could become better.
        max_tokens: of an answer.  min_tokens: stop tokens are passed over before so many.
        stop_token_ids: tokens that end an answer.

    Attributes:
        beams: running sequences, best first; [None] at the prompt.
        finished: (score, sequence) of the best finished ones, best first, at most ``width``.
        is_done: nothing can be won any more.
    """

    def __init__(
        self,
        width: int,
        *,
        length_penalty: float,
        early_stopping: bool | str,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.width = width
        self.beams: list[Hypothesis | None] = [None]
        self.finished: list[tuple[float, Hypothesis]] = []
        self.is_done = False
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_ids = stop_token_ids
        self._num_considered = max(2, 1 + len(stop_token_ids)) * width
        self._num_tokens = 0

    @property
    def num_candidates(self) -> int:
        """Best tokens of each beam that ``advance`` must know."""
        return self.width + len(self._stop_ids)

    def advance(self, entries: Sequence[TokenLogprobs]) -> list[Continuation]:
        """Take one more token for all beams.

        Args:
            entries: one a beam, with the ``num_candidates`` best tokens after the sampled one.
        Returns: the beams that go on, best first; what they and ``finished`` are is also in the attributes.
        """
        self._num_tokens += 1
        considered = nlargest(
            self._num_considered, self._candidates(entries), key=lambda c: c.hypothesis.logprob
        )
        going_on = [c for c in considered if not self._ends(c.hypothesis)][: self.width]
        ended = [c.hypothesis for c in considered[: self.width] if self._ends(c.hypothesis)]
        if not (self._early_stopping is True and len(self.finished) == self.width):
            scored = self.finished + [(self._score(h.logprob, h.length), h) for h in ended]
            self.finished = nlargest(self.width, scored, key=lambda pair: pair[0])
        self.beams = [c.hypothesis for c in going_on]
        self.is_done = not going_on or not self._can_improve(going_on[0].hypothesis.logprob)
        return going_on

    def _candidates(self, entries: Sequence[TokenLogprobs]) -> Iterator[Continuation]:
        for index, (beam, entry) in enumerate(zip(self.beams, entries, strict=True)):
            before = 0.0 if beam is None else beam.logprob
            for token, logprob in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True):
                if self._num_tokens > self._min_tokens or token not in self._stop_ids:
                    link = Hypothesis(beam, token, before + logprob, self._num_tokens, entry)
                    yield Continuation(index, link)

    def _ends(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.length >= self._max_tokens or hypothesis.token in self._stop_ids

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._length_penalty)

    def _can_improve(self, best_logprob: float) -> bool:
        """Whether the best running beam may still become better than the worst finished answer."""
        if len(self.finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        is_patient = self._early_stopping == "never" and self._length_penalty > 0.0
        length = self._max_tokens if is_patient else self._num_tokens
        return self._score(best_logprob, length) > self.finished[-1][0]

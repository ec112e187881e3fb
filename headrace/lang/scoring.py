"""How choices are scored: tokens of text and choice together, of which those behind the shared text count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class ScoringBatch(NamedTuple):
    """Prompts that share their beginning.

    prompts: token ids of the text with each choice.
    starts: index of each prompt's first token that belongs to its choice.
    """

    prompts: list[list[int]]
    starts: list[int]

    @property
    def logprobs_from(self) -> int:
        """The first token of which any log-probability is needed."""
        return min(self.starts)

    def means(self, logprobs: Sequence[Sequence[float]]) -> list[float]:
        """The mean log-probability of each choice's tokens.

        Args:
            logprobs: one list a prompt, of its tokens from ``logprobs_from`` on.
        """
        first = self.logprobs_from
        means = []
        for values, start in zip(logprobs, self.starts, strict=True):
            own = values[start - first :]
            means.append(sum(own) / len(own))
        return means


def scoring_batch(context: list[int], joined: Sequence[list[int]]) -> ScoringBatch:
    """The batch for choices.

    Args:
        context: tokens of the text before them.
        joined: tokens of that text with each choice. Where text and choice melt into one token, it counts as the
            choice's. A prompt's first token has no probability, so it never counts.
    """
    starts = [min(num_shared(context, ids), len(ids) - 1) for ids in joined]
    return ScoringBatch(list(joined), [max(start, 1) for start in starts])


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens, or characters, are the same at the beginning of both."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))

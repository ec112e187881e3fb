"""Token counts of a request, as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.outputs import RequestOutput


class UsageCounter:
    """Adds up prompts, answers and cached tokens over the prompts of one request, whole or streamed."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._num_completion_tokens = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output: the tokens in it are new. Called for every token of a stream."""
        if index not in self._prompts:
            self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens  # may be known late
        for answer in output.outputs:
            self._num_completion_tokens += len(answer.token_ids)

    def report(self, counts_answers: bool = True) -> dict[str, Any]:
        """The usage object."""
        prompt_tokens = sum(self._prompts.values())
        completion_tokens = self._num_completion_tokens if counts_answers else 0
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def usage_of(outputs: Iterable[RequestOutput], counts_answers: bool = True) -> dict[str, Any]:
    """The usage object of finished prompts."""
    counter = UsageCounter()
    for index, output in enumerate(outputs):
        counter.add(index, output)
    return counter.report(counts_answers)

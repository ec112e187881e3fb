"""MicroBatches: which running streams decode in a step, where stages of a pipeline work on different steps."""

from __future__ import annotations

from headrace.core.request import Request

_MOST_AWAITED = 2
"""Tokens of a stream that are awaited at a time: one is being computed, and the step after it stands ready."""


class MicroBatches:
    """Each step takes a part of the streams, others than the steps just before it: a stage that has done its part of a
    step finds the next one's tokens sampled.

    Args:
        count: micro-batches, as many as stages; 1 where there is no pipeline.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def passes(self) -> tuple[bool, ...]:
        """How to look for streams, ``in_turn`` or not: when it is nobody's turn, a stream may follow its own last step,
        for whose token the first stage will wait."""
        return (False,) if self.count == 1 else (True, False)

    def size(self, num_streams: int) -> int:
        """The most streams of a step."""
        return -(-num_streams // self.count)

    def must_wait(self, request: Request, step_id: int, in_turn: bool) -> bool:
        """Whether a stream leaves this step to others."""
        if self.count == 1:
            return False
        is_too_soon = in_turn and request.num_steps_in_flight and step_id - request.last_step_id < self.count
        return bool(is_too_soon) or request.num_placeholders >= _MOST_AWAITED

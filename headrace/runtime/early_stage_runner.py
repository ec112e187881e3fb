"""EarlyStageRunner: a ModelRunner of a stage that does not sample; tokens reach it from the host, with later steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.output import SchedulerOutput
from headrace.core.token_mask import TokenMask
from headrace.runtime.device_table import Write
from headrace.runtime.model_runner import ModelRunner, PendingOutput


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What the last stage sampled in a step: each request's tokens."""

    step_id: int
    request_ids: Sequence[str]
    token_ids: Sequence[list[int]]


class EarlyStageRunner(ModelRunner):
    """Keeps in mind where the tokens of steps in flight belong, until they come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaited: dict[int, dict[str, tuple[int, int]]] = {}
        self._born: dict[str, int] = {}

    def execute_model(
        self, scheduler_output: SchedulerOutput, before_forward: Callable[[], None] | None = None
    ) -> None:
        """Run the forward of one step."""
        for request_id in scheduler_output.removed_request_ids:
            self._born.pop(request_id, None)
        for new in scheduler_output.new_requests:
            self._born[new.request_id] = scheduler_output.step_id
        super().execute_model(scheduler_output, before_forward)

    def sample_tokens(self, mask: TokenMask | None = None) -> PendingOutput:
        """Note where the step's tokens will go."""
        step = self._step
        assert step is not None, "sample_tokens needs one execute_model before it"
        self._step = self._result = None
        places = zip(step.sampled_slots.tolist(), step.sampled_positions.tolist(), strict=True)
        self._awaited[self._step_id] = dict(zip(step.sampled_ids, places, strict=True))
        return PendingOutput(self._step_id, [], None, None, {}, {})

    def take_tokens(self, step: StepTokens) -> None:
        """Put a step's tokens where the next steps of their requests read them.

        A request that has left since, or left and come back with its tokens, gets none: its slot may be another's.
        """
        awaited = self._awaited.pop(step.step_id, {})
        writes: list[Write] = []
        for request_id, tokens in zip(step.request_ids, step.token_ids, strict=True):
            if self._born.get(request_id, step.step_id + 1) <= step.step_id:
                slot, position = awaited[request_id]
                writes.append((slot, position, tokens))
        self.states.tokens.write(writes)

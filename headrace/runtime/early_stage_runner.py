"""EarlyStageRunner: a ModelRunner of a stage that does not sample; the first stage gets tokens from the last one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from headrace.core.output import SchedulerOutput
from headrace.core.token_mask import TokenMask
from headrace.runtime.model_runner import ModelRunner, PendingOutput
from headrace.runtime.step_layout import StepLayout
from headrace.runtime.step_result import StepResult
from headrace.runtime.upload import upload


class Coming(Protocol):
    """Tokens on their way (``parallel.token_link.ComingTokens``)."""

    def wait(self) -> torch.Tensor:
        """They, [S] int32 on the host."""


class Neighbours(Protocol):
    """The stages beside this one (``parallel.pipeline.PipelineLink``)."""

    def receive(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Fill the tensors with what the stage before sends."""

    def send(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Send them to the stage after."""


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """What a step samples: requests, and where their tokens [S] go in the flat token table."""

    step_id: int
    request_ids: Sequence[str]
    places: np.ndarray
    tokens: Coming


class EarlyStageRunner(ModelRunner):
    """Tokens are put into the table when a step is about to read them, as late as can be: what the host does for the
    step before that hides behind the steps in flight.

    Attributes:
        expect: on the first stage: called with how many tokens a step samples, they come later. The others need none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.expect: Callable[[int], Coming] | None = None
        self._awaited: deque[_Awaited] = deque()
        self._born: dict[str, int] = {}
        self._reads: AbstractSet[str] = set()

    def execute_model(
        self, scheduler_output: SchedulerOutput, before_forward: Callable[[], None] | None = None
    ) -> None:
        """Run the forward of one step."""
        # What the host appends comes after the sampled tokens or in their place.
        self._take_tokens_of(scheduler_output.appended_token_ids.keys())
        for request_id in scheduler_output.removed_request_ids:
            self._born.pop(request_id, None)
        for new in scheduler_output.new_requests:
            self._born[new.request_id] = scheduler_output.step_id
        self._reads = set(scheduler_output.request_ids)
        super().execute_model(scheduler_output, before_forward)

    def sample_tokens(self, mask: TokenMask | None = None) -> PendingOutput:
        """Note where the step's tokens will go."""
        step = self._step
        assert step is not None, "sample_tokens needs one execute_model before it"
        self._step = self._result = None
        if self.expect is not None and step.sampled_ids:
            coming = self.expect(len(step.sampled_ids))
            self._awaited.append(_Awaited(self._step_id, step.sampled_ids, step.sampled_places, coming))
        return PendingOutput(self._step_id, [], None, None, {}, {})

    def link_to(self, neighbours: Neighbours) -> Neighbours:
        """The link for steps that are graphs: their ids are gathered when they start."""
        return _TokensFirst(self, neighbours)

    def take_tokens(self) -> None:
        """Wait for the tokens that the step being executed reads, and put them where it does."""
        self._take_tokens_of(self._reads)

    def _run(self, step: StepLayout) -> StepResult:
        self.take_tokens()
        return super()._run(step)

    def _take_tokens_of(self, request_ids: AbstractSet[str]) -> None:
        """All up to the newest step that sampled for one of these."""
        newest = 0
        for awaited in self._awaited:
            if not request_ids.isdisjoint(awaited.request_ids):
                newest = awaited.step_id
        while self._awaited and self._awaited[0].step_id <= newest:
            self._put(self._awaited.popleft())

    def _put(self, step: _Awaited) -> None:
        """A request that has left since, or left and come back, gets none: its slot may be another's."""
        never = step.step_id + 1
        is_there = [self._born.get(name, never) <= step.step_id for name in step.request_ids]
        places = np.where(is_there, step.places, self.states.unread_place)
        on_device = upload([places, step.tokens.wait().numpy()], self._device)
        self.states.tokens.tensor.view(-1).index_copy_(0, *on_device)


class _TokensFirst:
    """A first stage has no stage before it; it waits for tokens in its place."""

    def __init__(self, runner: EarlyStageRunner, neighbours: Neighbours) -> None:
        self._runner = runner
        self.send = neighbours.send
        self._receive = neighbours.receive

    def receive(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Nothing is read before all of it is there."""
        self._runner.take_tokens()
        self._receive(tensors)

"""LiveRequest: one request that the core has not finished with, and how it comes into the metrics."""

from __future__ import annotations

from headrace.core.output import EngineCoreOutput, EngineCoreRequest
from headrace.core.timeline import Timeline
from headrace.engine.mailbox import Mailbox
from headrace.observe.metrics import ServingMetrics


class LiveRequest:
    """Every answer is counted once: by the core's news of its end, or by ``count_ends`` where there will be none.

    Args:
        user_id: what the caller calls it; the core's id is used once only, so that late news of a request that was
            aborted never meet another that took its name.
        request: as the core has it.
        mailbox, index: its reader, and its place in the reader's batch.
        metrics: where it is counted.

    Attributes:
        is_answered: its reader has been given everything; the core's last word is still to come.
        running: answers that the core has not ended.
        stopped: answers that a stop string ended.
    """

    __slots__ = (
        "_has_started",
        "_metrics",
        "_num_tokens",
        "index",
        "is_answered",
        "mailbox",
        "request",
        "running",
        "stopped",
        "user_id",
    )

    def __init__(
        self,
        user_id: str,
        request: EngineCoreRequest,
        mailbox: Mailbox,
        index: int,
        metrics: ServingMetrics,
    ) -> None:
        self.user_id = user_id
        self.request = request
        self.mailbox = mailbox
        self.index = index
        self.is_answered = False
        self.running = set(range(request.sampling_params.num_told_answers))
        self.stopped: set[int] = set()
        self._metrics = metrics
        self._has_started = False
        self._num_tokens = [0] * request.sampling_params.num_told_answers

    def count(self, output: EngineCoreOutput) -> None:
        """Count the core's news of one of its answers."""
        if not self._has_started:
            self._has_started = True
            self._metrics.num_prompt_tokens += len(self.request.prompt_token_ids)
        child = output.child_index
        self._num_tokens[child] += len(output.new_token_ids)
        self._metrics.num_generation_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            self._count_finish(child, output.finish_reason, output.timeline)
            self.running.discard(child)

    def count_ends(self, reason: str) -> None:
        """Count the answers whose end the core will not tell; a stop string may have ended some for their reader."""
        for child in self.running:
            self._count_finish(child, "stop" if child in self.stopped else reason, None)

    def _count_finish(self, child: int, reason: str, timeline: Timeline | None) -> None:
        """Count one answer's end, as its reader was told of it."""
        request = self.request
        num_prompt_tokens, num_tokens = len(request.prompt_token_ids), self._num_tokens[child]
        self._metrics.count_finish(reason, request.arrival_time, num_prompt_tokens, num_tokens, timeline)

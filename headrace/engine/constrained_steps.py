"""ConstrainedSteps: what a constraint does to its request, between the mask source and the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.completion import commit_forced, finish
from headrace.core.interfaces import Advance, MaskSource
from headrace.core.output import EngineCoreOutput, ErrorKind
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler import Scheduler
from headrace.errors import GrammarError

FindRequest = Callable[[EngineCoreOutput], Request]


class ConstrainedSteps:
    """Lets requests go on when their grammar is there, commits what it forces, and ends them where it ends.

    num_violations: answers that broke their constraint; each ended with an error.
    num_forced_tokens: tokens that were committed without a step of their own.
    """

    def __init__(self, scheduler: Scheduler, source: MaskSource) -> None:
        self._scheduler = scheduler
        self._source = source
        self.num_violations = 0
        self.num_forced_tokens = 0

    def prepare(self) -> list[EngineCoreOutput]:
        """Start requests whose grammar has come, refuse those whose grammar never will; their news."""
        news: list[EngineCoreOutput] = []
        for request, error in self._source.take_failures():
            news.append(self._refuse(request, error))
        for request, advance in self._source.take_ready():
            self._apply(request, advance, news)
        return news

    def _refuse(self, request: Request, error: GrammarError) -> EngineCoreOutput:
        item = EngineCoreOutput(request.parent_id, request.child_index)
        self._spoil(item, error)
        self._finish(request, item, FinishReason.ERROR, item.message)
        return item

    def _spoil(self, item: EngineCoreOutput, problem: str | GrammarError) -> None:
        """Let ``item`` end its answer with an error: the request's own, or ours."""
        if isinstance(problem, GrammarError):
            item.refusal = ErrorKind(type(problem).__name__, problem.param, problem.code)
        else:
            self.num_violations += 1
        item.finish_reason, item.message = FinishReason.ERROR.value, str(problem)

    def advance(self, news: list[EngineCoreOutput], find: FindRequest) -> list[EngineCoreOutput]:
        """Matchers follow committed tokens, here and nowhere else. Further news, to be told after these."""
        if self._source.is_idle:
            return []
        more: list[EngineCoreOutput] = []
        for item in news:
            request = find(item)
            advance = self._source.accept(request, item.new_token_ids) if item.new_token_ids else None
            if advance is not None and advance.violation is not None and request.is_finished:
                self._spoil(item, advance.violation)
            elif advance is not None:
                self._apply(request, advance, more)
            if request.is_finished:
                self._source.release(request)
        self._source.prefetch()
        return more

    def _apply(self, request: Request, advance: Advance, news: list[EngineCoreOutput]) -> None:
        """Do to a running request what its grammar says, until it says nothing more."""
        while advance.forced:
            is_sampling = request.num_placeholders > 0
            item = commit_forced(
                self._scheduler.lifecycle, self._scheduler.in_flight, request, advance.forced
            )
            self.num_forced_tokens += len(item.new_token_ids)
            if is_sampling and not request.is_finished:
                self._source.expect(request, item.new_token_ids[0])
            news.append(item)
            next_advance = self._source.accept(request, item.new_token_ids)
            assert next_advance is not None
            advance = next_advance
        if advance.violation is not None and request.is_finished:  # by the forced tokens that were told last
            self._spoil(news[-1], advance.violation)
        elif advance.violation is not None:
            item = EngineCoreOutput(request.parent_id, request.child_index)
            self._spoil(item, advance.violation)
            self._finish(request, item, FinishReason.ERROR, item.message)
            news.append(item)
        elif advance.is_complete and not request.is_finished:
            item = EngineCoreOutput(request.parent_id, request.child_index)
            self._finish(request, item, FinishReason.STOP, None)
            news.append(item)
        if request.is_finished:
            self._source.release(request)

    def _finish(
        self, request: Request, item: EngineCoreOutput, reason: FinishReason, message: str | None
    ) -> None:
        finish(self._scheduler.lifecycle, request, item, reason, message=message)
        self._scheduler.lifecycle.drop_stopped()
        self._source.release(request)

"""Constraints: the grammars of one engine's requests, from compiling to the masks of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from headrace.core.interfaces import Advance
from headrace.core.output import SchedulerOutput
from headrace.core.request import Request
from headrace.core.token_mask import TokenMask
from headrace.engine.constrained_answer import ConstrainedAnswer, first_token_error
from headrace.errors import GrammarError
from headrace.grammar.base import TokenVocabulary
from headrace.grammar.compiler import GrammarCompiler, PendingGrammar
from headrace.structured_outputs import Constraint

_POLL_S = 0.01


class Constraints:
    """The mask source of an engine core; see ``core.interfaces.MaskSource`` for its methods.

    Masks are computed by a thread as soon as a step's tokens are in, beside the next forward; ``fill`` gathers them.

    Args:
        load_vocabulary: reads the model's tokens; called when the first constraint comes, in another thread.
        max_compile_s: a constraint that takes longer to compile is refused.
        jump_forward: commit forced tokens at once; False samples them one a step, to the same text.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], TokenVocabulary],
        *,
        max_compile_s: float = 10.0,
        jump_forward: bool = True,
    ) -> None:
        self.compiler = GrammarCompiler(load_vocabulary)
        self._max_compile_s = max_compile_s
        self.jump_forward = jump_forward
        self._pending: dict[str, tuple[Request, PendingGrammar]] = {}
        self._answers: dict[str, ConstrainedAnswer] = {}
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="headrace-masks")
        self._filling: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is constrained."""
        return not self._answers and not self._pending

    # ---- before a request runs

    def start(self, request: Request, constraint: Constraint) -> None:
        """Begin to compile, or find it compiled."""
        self._pending[request.request_id] = request, self.compiler.submit(constraint)

    def is_ready(self, request: Request) -> bool:
        """True once ``take_ready`` gave the request out."""
        return request.request_id not in self._pending

    def take_ready(self) -> list[tuple[Request, Advance]]:
        """Requests whose grammar is there."""
        ready = []
        for request, pending in list(self._pending.values()) if self._pending else ():
            if pending.is_done() and self._failure(request, pending) is None:
                del self._pending[request.request_id]
                grammar = pending.result()
                answer = ConstrainedAnswer(request, grammar, self.compiler.vocabulary, self.jump_forward)
                self._answers[request.request_id] = answer
                ready.append((request, answer.begin()))
        return ready

    def take_failures(self) -> list[tuple[Request, GrammarError]]:
        """Requests whose grammar could not be compiled, or not in time, or leaves them no first token."""
        failures = []
        for request, pending in list(self._pending.values()) if self._pending else ():
            error = self._failure(request, pending)
            if error is not None:
                del self._pending[request.request_id]
                failures.append((request, error))
        return failures

    def _failure(self, request: Request, pending: PendingGrammar) -> GrammarError | None:
        if pending.is_done():
            error = pending.future.exception()
            assert error is None or isinstance(error, GrammarError)
            return error or first_token_error(request, pending.result())
        if time.monotonic() - pending.since <= self._max_compile_s:
            return None
        kind = pending.constraint.kind
        return GrammarError(
            f"structured_outputs.{kind} takes more than {self._max_compile_s:g} s to compile "
            "(max_grammar_compile_s): simplify it",
            param=f"structured_outputs.{kind}",
            code="constraint_too_complex",
        )

    def wait_prepared(self) -> None:
        """Wait a moment for a grammar."""
        futures = [pending.future for _, pending in self._pending.values()]
        if futures:
            wait(futures, timeout=_POLL_S, return_when="FIRST_COMPLETED")

    # ---- each step

    def awaits_results(self, scheduler_output: SchedulerOutput) -> bool:
        """True while a constrained request of this step has a sample of an earlier one outstanding."""
        return any(answer.request.num_placeholders > 1 for _, answer in self._sampled(scheduler_output))

    def fill(self, scheduler_output: SchedulerOutput) -> TokenMask | None:
        """The masks of the step."""
        found = self._sampled(scheduler_output)
        if not found:
            return None
        self._settle()
        words = np.empty((len(found), self.compiler.vocabulary.num_mask_words), np.uint32)
        for place, (_, answer) in enumerate(found):
            answer.write_mask(words[place])
        return TokenMask(np.array([row for row, _ in found], np.int64), words)

    def _sampled(self, scheduler_output: SchedulerOutput) -> list[tuple[int, ConstrainedAnswer]]:
        """(row, answer) of the constrained requests that sample in the step."""
        answers, ids = self._answers, scheduler_output.request_ids
        if not answers:
            return []
        rows = ((row, answers.get(ids[index])) for row, index in enumerate(scheduler_output.sampled))
        return [(row, answer) for row, answer in rows if answer is not None]

    def accept(self, request: Request, token_ids: list[int]) -> Advance | None:
        """Advance the request's matcher."""
        answer = self._answers.get(request.request_id)
        if answer is None:
            return None
        self._settle()
        return answer.accept(token_ids)

    def expect(self, request: Request, token_id: int) -> None:
        """The next mask of the request allows this token alone."""
        self._answers[request.request_id].expect(token_id)

    def prefetch(self) -> None:
        """Compute the masks of answers that advanced, in the thread."""
        stale = [answer for answer in self._answers.values() if answer.is_stale]
        if stale:
            self._settle()
            self._filling = self._filler.submit(_compute_masks, stale)

    def _settle(self) -> None:
        """After it no thread touches a matcher."""
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._answers.pop(request.request_id, None)
        self._pending.pop(request.request_id, None)

    def shutdown(self) -> None:
        """End the threads."""
        self._settle()
        self._filler.shutdown(wait=False)
        self.compiler.shutdown()


def _compute_masks(answers: list[ConstrainedAnswer]) -> None:
    for answer in answers:
        answer.compute_mask()

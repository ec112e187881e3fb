"""Answer: one sequence of a request on the user's side, from its tokens to its text."""

from __future__ import annotations

import msgspec

from headrace.core.output import EngineCoreOutput, TokenLogprobs
from headrace.core.timeline import Timeline
from headrace.engine.logprob_text import logprob_dict
from headrace.grammar.answer_check import AnswerCheck, AnswerChecks
from headrace.outputs import CompletionOutput, Logprob
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import Constraint
from headrace.tokenizer.base import Tokenizer
from headrace.tokenizer.detokenizer import IncrementalDetokenizer


def best_answers(answers: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The ``n`` answers of highest log-probability per token, the best first; all of them in order if there are n."""
    if len(answers) <= n:
        return answers

    def score(answer: CompletionOutput) -> float:
        return (answer.cumulative_logprob or 0.0) / max(len(answer.token_ids), 1)

    best = sorted(answers, key=score, reverse=True)[:n]
    for index, answer in enumerate(best):
        answer.index = index
    return best


class Answer:
    """Collects the news of one child of a request.

    timeline: given by the core with its last news; a stop string finishes the answer before that.

    Args:
        constraint: what the text must be. A text that ends is called "stop" only when it is that. Where it may not end,
            and always where the grammar knows the end (JSON, choices), stop strings are text like any other.
        checks: of such texts.
    """

    __slots__ = (
        "_check",
        "_checks",
        "_detokenizer",
        "_num_sent_chars",
        "_num_sent_tokens",
        "_params",
        "_text",
        "_tokenizer",
        "cumulative_logprob",
        "error",
        "finish_reason",
        "index",
        "logprobs",
        "stop_reason",
        "timeline",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        constraint: Constraint | None = None,
        checks: AnswerChecks | None = None,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.timeline: Timeline | None = None
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._text = ""
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self._checks = checks
        self._check = checks.of(constraint) if constraint is not None and checks is not None else None
        ends_by_stop = self._check is None or not self._check.is_self_ending
        self._detokenizer: IncrementalDetokenizer | None = None
        if self._tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings if ends_by_stop else [],
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                may_end=None if self._check is None else self._check.end_finder().is_whole,
            )

    def take(self, news: EngineCoreOutput) -> bool:
        """Add news of the core, which then say what the user is told: without what came past a stop string, and with
        the answer's reason to end. Returns True if its text met a stop string, so that the core must be told to stop.
        """
        num_before, was_over = len(self.token_ids), self.finish_reason is not None
        is_stopped = not was_over and self._add(news)
        if was_over or is_stopped:
            self._cut(news, len(self.token_ids) - num_before)
        if news.finish_reason is None:
            return is_stopped
        news.finish_reason, self.timeline = self.finish_reason, news.timeline
        return False

    def _add(self, news: EngineCoreOutput) -> bool:
        """Add news of an answer that is not over. True if a stop string ended it."""
        num_before = len(self.token_ids)
        self.token_ids += news.new_token_ids
        is_stopped = self._detokenizer is not None and self._add_text(self._detokenizer, news)
        if self.logprobs is not None and news.logprobs:
            self._add_logprobs(self.logprobs, news.logprobs[: len(self.token_ids) - num_before], num_before)
        if not is_stopped:
            self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason
            self.error = news.message
        if self.finish_reason == "stop" and self._check is not None:
            self._check_whole(self._check)
        return is_stopped

    def _cut(self, news: EngineCoreOutput, num_told: int) -> None:
        """Take off what the core computed past a stop string: tokens and their times count nowhere."""
        news.new_token_ids = news.new_token_ids[:num_told]
        if news.timeline is not None:
            times = news.timeline.token_times[: len(self.token_ids)]
            news.timeline = msgspec.structs.replace(news.timeline, token_times=times)

    def _check_whole(self, check: AnswerCheck) -> None:
        """An answer that ended is an error if it is not what was asked for."""
        if self._detokenizer is None:
            return  # token ids only; the matcher has followed them
        text = self._text
        if isinstance(self.stop_reason, str) and self._params.include_stop_str_in_output:
            text = text.removesuffix(self.stop_reason)
        problem = check.problem(text)
        if problem is None or self._hides_tokens(check):
            return
        self.finish_reason = "error"
        self.error = f"the answer is not what its constraint asks for: {problem}"
        assert self._checks is not None
        self._checks.num_violations += 1

    def _hides_tokens(self, check: AnswerCheck) -> bool:
        """True where special tokens are asked for, which the text does not show; the matcher has followed them."""
        assert self._tokenizer is not None
        table = self._tokenizer.byte_table(False)
        return check.mentions(table[token].decode(errors="replace") for token in self._tokenizer.special_ids)

    def _add_text(self, detokenizer: IncrementalDetokenizer, news: EngineCoreOutput) -> bool:
        """Decode the new tokens; True if a stop string ended the answer."""
        new_ids = news.new_token_ids
        if news.finish_reason == "stop" and new_ids and not self._params.include_stop_str_in_output:
            new_ids = new_ids[:-1]  # the token that stopped it is no part of the text
        self._text += detokenizer.append(new_ids)
        if news.finish_reason is not None:
            self._text += detokenizer.flush()
        if detokenizer.stop_reason is None:
            return False
        del self.token_ids[detokenizer.num_tokens_used :]
        self.finish_reason, self.stop_reason = "stop", detokenizer.stop_reason
        return True

    def _add_logprobs(
        self, logprobs: list[dict[int, Logprob]], entries: list[TokenLogprobs], first: int
    ) -> None:
        for position, entry in enumerate(entries, first):
            logprobs.append(logprob_dict(entry, self._tokenizer, self._own_text(position)))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry.logprobs[0]

    def _own_text(self, position: int) -> str | None:
        """The characters that the token at ``position`` gave to the text; None if it is not part of the text."""
        if self._detokenizer is None or self._tokenizer is None:
            return None
        texts = self._detokenizer.token_texts
        is_hidden = not self._tokenizer.byte_table(self._params.skip_special_tokens)[self.token_ids[position]]
        return None if is_hidden or position >= len(texts) else texts[position]

    def end(self, reason: str, error: str | None = None) -> None:
        """Finish it from this side: the engine died or refused it, or the user left."""
        if self._detokenizer is not None:
            self._text += self._detokenizer.flush()
        self.finish_reason, self.error = reason, error

    def whole(self) -> CompletionOutput:
        """All of it so far. The lists are the caller's."""
        return CompletionOutput(
            index=self.index,
            text=self._text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def delta(self) -> CompletionOutput:
        """What is new since the last call."""
        sent_tokens, sent_chars = self._num_sent_tokens, self._num_sent_chars
        self._num_sent_tokens, self._num_sent_chars = len(self.token_ids), len(self._text)
        return CompletionOutput(
            index=self.index,
            text=self._text[sent_chars:],
            token_ids=self.token_ids[sent_tokens:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[sent_tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

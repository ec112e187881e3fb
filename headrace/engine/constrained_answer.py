"""ConstrainedAnswer: one request's place in its grammar, and the mask of its next token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headrace.core.interfaces import Advance
from headrace.core.request import FinishReason, Request
from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, TokenVocabulary

_NO_TOKENS: frozenset[int] = frozenset()


class ConstrainedAnswer:
    """Follows one request's committed tokens.

    The tokens that end the answer (the model's, and the request's own stop tokens) end it only where the text may end;
    elsewhere a stop token of the request is text like any other. So while the next token is awaited
    ``request.stop_token_ids`` holds them or nothing.

    Forced tokens are spelled once, by the tokenizer, and then taken one after the other whether they are committed at
    once or sampled one a step: the ids are the same. They are not committed at once where that would lose something
    the request wants: log-probabilities of its tokens, or words and tokens it forbids.

    is_stale: the mask is of an earlier place.
    """

    __slots__ = (
        "_ends",
        "_expected",
        "_forced",
        "_is_end_allowed",
        "_jumps",
        "_mask",
        "_matcher",
        "_vocabulary",
        "is_stale",
        "request",
    )

    def __init__(
        self, request: Request, grammar: CompiledGrammar, vocabulary: TokenVocabulary, jump_forward: bool
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.is_stale = True
        self._matcher = grammar.matcher.copy()
        self._mask = grammar.first_mask.copy()
        self._vocabulary = vocabulary
        self._ends = request.stop_token_ids
        self._is_end_allowed = False
        self._forced: list[int] = []
        self._expected: int | None = None
        is_plain = params.logprobs is None and not params.bad_word_ids and params.allowed_token_ids is None
        self._jumps = jump_forward and is_plain
        request.stop_token_ids = _NO_TOKENS

    def begin(self) -> Advance:
        """Where it stands before the first token. What must come first joins the prompt, if nobody needs the prompt's
        logits, and no sibling waits to share its blocks."""
        params = self.request.sampling_params
        self._forced = self._matcher.forced_tokens()
        if params.prompt_logprobs is not None or params.n > 1:
            return Advance()
        return self._advance()

    def accept(self, token_ids: list[int]) -> Advance:
        """Advance over committed tokens; see ``MaskSource.accept``."""
        is_stopped = self.request.finish_reason is FinishReason.STOP
        text_ids = token_ids[:-1] if is_stopped else token_ids
        self.request.stop_token_ids = _NO_TOKENS
        self.is_stale = True
        try:
            if text_ids and not self._matcher.accept(text_ids):
                return Advance(violation="a token was sampled that the constraint forbids")
        except GrammarError as error:
            return Advance(violation=error)
        if is_stopped and not self._matcher.is_finished():
            return Advance(violation="the answer ended where the constraint does not allow it")
        if self._forced:
            assert self._forced[: len(text_ids)] == text_ids, (
                f"{self.request.request_id}: forced tokens were left out"
            )
            self._forced = self._forced[len(text_ids) :]
        if self.request.is_finished:
            return Advance()
        if self._matcher.is_complete():
            return Advance(is_complete=True)
        self._forced = self._forced or self._matcher.forced_tokens()
        return self._advance()

    def _advance(self) -> Advance:
        return Advance(forced=list(self._forced)) if self._jumps else Advance()

    def expect(self, token_id: int) -> None:
        """The next mask that is written allows this token alone."""
        self._expected = token_id

    def compute_mask(self) -> None:
        """Work out which tokens may come next. Runs in the thread that fills masks."""
        self.is_stale = False
        if self._forced:
            return
        try:
            self._matcher.fill_mask(self._mask[None, :], 0)
        except GrammarError:
            self._mask[:] = 0  # no token may follow: the runner ends the request with an error
            return
        self._is_end_allowed = self._matcher.is_finished()
        _clear_bits(self._mask, self._vocabulary.end_ids)
        if self._is_end_allowed:
            # With ignore_eos an answer goes on as long as anything else may come.
            _set_bits(self._mask, self._ends)
            if not self._mask.any():
                self._ends = frozenset(self._vocabulary.end_ids)
                _set_bits(self._mask, self._ends)

    def write_mask(self, words: np.ndarray) -> None:
        """Put the mask of the next token into ``words`` [W] uint32."""
        if self._expected is not None or self._forced:
            token = self._forced[0] if self._expected is None else self._expected
            words[:] = 0
            _set_bits(words, (token,))
            self._expected = None
            return
        if self.is_stale:
            self.compute_mask()
        words[:] = self._mask
        if self._is_end_allowed:
            self.request.stop_token_ids = self._ends


def first_token_error(request: Request, grammar: CompiledGrammar) -> GrammarError | None:
    """The refusal of a request that forbids every token with which its constraint lets the answer begin."""
    params = request.sampling_params
    banned = [word[0] for word in params.bad_word_ids or () if len(word) == 1]
    if params.allowed_token_ids is None and not banned:
        return None
    mask = grammar.first_mask.copy()
    if grammar.matcher.is_finished():
        _set_bits(mask, request.stop_token_ids)
    if params.allowed_token_ids is not None:
        allowed = np.zeros_like(mask)
        _set_bits(allowed, params.allowed_token_ids)
        mask &= allowed
    _clear_bits(mask, banned)
    if mask.any():
        return None
    name = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
    return GrammarError(
        f"{name} leaves none of the tokens with which structured_outputs lets the answer begin: loosen one of them",
        param=name,
        code="no_token_allowed",
    )


def _set_bits(words: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        if token < 32 * len(words):
            words[token >> 5] |= np.uint32(1 << (token & 31))


def _clear_bits(words: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        if token < 32 * len(words):
            words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)

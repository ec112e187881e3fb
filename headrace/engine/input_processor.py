"""InputProcessor: from what a user asks to a checked request for the engine core."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from headrace.core.output import EngineCoreRequest
from headrace.engine.prompts import ParsedPrompt, Prompt, parse_prompt
from headrace.errors import RequestError
from headrace.grammar.constraint_text import prepare
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import Constraint, StructuredOutputsParams

_MAX_CONSTRAINTS = 64


class TextEncoder(Protocol):
    """What input processing needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""


class ProcessedInput(NamedTuple):
    """A request ready for the engine core, and the prompt's text where it is known."""

    request: EngineCoreRequest
    prompt: str | None


class InputProcessor:
    """Tokenizes and checks. Whatever it lets through, the engine can run: nothing later needs a second look.

    Args:
        vocab_size: rows of the model's embedding; every token id must be below it.
        max_model_len: prompt plus answer, in tokens.
        eos_token_ids: ids that end an answer unless the request ignores them.
        tokenizer: None when prompts are token ids only.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: TextEncoder | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = list(eos_token_ids)
        self._tokenizer = tokenizer
        self._prepare = lru_cache(_MAX_CONSTRAINTS)(prepare)

    def process(
        self,
        request_id: str,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams,
        *,
        clamp_max_tokens: bool = True,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> ProcessedInput:
        """Check one request.

        Args:
            clamp_max_tokens: ``max_tokens`` beyond the rest of the context is cut to it (vLLM's ``LLM``); False
                refuses the request instead (OpenAI's API, and vLLM's server).
            arrival_time: monotonic seconds; now by default.

        Raises: RequestError; ``code`` is "context_length_exceeded" when the prompt, or prompt and answer together,
        are too long.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 1 << 63:
            raise RequestError(f"priority must be an integer; got {priority!r}", param="priority")
        parsed = prompt if isinstance(prompt, ParsedPrompt) else parse_prompt(prompt)
        token_ids = parsed.token_ids if parsed.token_ids is not None else self._encode(parsed.text or "")
        self.check_prompt(token_ids)
        params = self._check_params(params, len(token_ids))
        wanted, params.structured_outputs = params.structured_outputs, None
        if wanted is not None and self._tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, which this engine has not (skip_tokenizer_init)",
                param="structured_outputs",
            )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            max_tokens=self._max_tokens(params.max_tokens, len(token_ids), clamp_max_tokens),
            eos_token_ids=self.eos_token_ids,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            namespace=parsed.cache_salt,
            tenant=tenant,
            priority=priority,
            constraint=None if wanted is None else self.constraint_of(wanted)[0],
        )
        return ProcessedInput(request, parsed.text)

    def constraint_of(self, wanted: StructuredOutputsParams) -> tuple[Constraint, list[str]]:
        """(the constraint as the engine takes it, what it says and nobody enforces). Recent ones are kept.

        Raises: GrammarError naming the path of what no grammar can enforce.
        """
        return self._prepare(wanted.to_constraint())

    def check_prompt(self, token_ids: list[int]) -> None:
        """Raises RequestError for a prompt that no request may have: empty, too long, or with unknown ids."""
        if not token_ids:
            raise RequestError("the prompt is empty: it must have at least one token", param="prompt")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but prompt and answer together may have at most "
                f"{self.max_model_len} (max_model_len): shorten it to {self.max_model_len - 1} or fewer",
                param="prompt",
                code="context_length_exceeded",
            )
        self.check_vocabulary("prompt", token_ids)

    def check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        """Raises RequestError for the first id that the model lacks; ``name`` is the field that has it."""
        ids = token_ids if isinstance(token_ids, Sequence) else list(token_ids)
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"{name} has token id {wrong}; the model's vocabulary is [0, {self.vocab_size - 1}]: "
                "tokenize with this model's tokenizer",
                param=name,
            )

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer (skip_tokenizer_init): give the prompt as token ids",
                param="prompt",
            )
        return self._tokenizer.encode(text)

    def _max_tokens(self, wanted: int | None, num_prompt_tokens: int, clamp: bool) -> int:
        room = self.max_model_len - num_prompt_tokens
        if wanted is None or (wanted > room and clamp):
            return room
        if wanted > room:
            raise RequestError(
                f"max_tokens is {wanted}, but after a prompt of {num_prompt_tokens} tokens only {room} fit into the "
                f"model's {self.max_model_len} tokens of context: ask for at most {room}, or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return wanted

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A checked copy with ``bad_words`` spelled as token ids; the user's object may change meanwhile."""
        params = params.clone()
        if params.num_told_answers > params.n and params.logprobs is None:
            params.logprobs = 0  # answers are ranked by them
        if params.prompt_logprobs is not None and params.logprobs_from >= num_prompt_tokens:
            raise RequestError(
                f"logprobs_from is {params.logprobs_from}, but the prompt has only {num_prompt_tokens} tokens",
                param="logprobs_from",
            )
        if self._tokenizer is None and (params.stop_strings or params.bad_words):
            name = "stop" if params.stop_strings else "bad_words"
            raise RequestError(
                f"{name} needs a tokenizer, which this engine has not (skip_tokenizer_init): use "
                f"{'stop_token_ids' if name == 'stop' else 'bad_word_ids'}",
                param=name,
            )
        if params.bad_words:
            params.bad_word_ids = [*(params.bad_word_ids or []), *self._spell(params.bad_words)]
        self.check_vocabulary("stop_token_ids", params.stop_token_ids or ())
        self.check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self.check_vocabulary("logit_bias", params.logit_bias or ())
        for word in params.bad_word_ids or ():
            self.check_vocabulary("bad_word_ids", word)
        return params

    def _spell(self, words: list[str]) -> list[list[int]]:
        """Token ids of each word as it stands at the start of a text and after a space, as vLLM does."""
        assert self._tokenizer is not None
        spelled: list[list[int]] = []
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in spelled:
                    spelled.append(ids)
        return spelled

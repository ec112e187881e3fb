"""What a request asks of the sampler. Names, defaults and meanings follow vLLM's ``SamplingParams``."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 1024


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How to pick tokens and when to stop.

    n: answers per prompt; they share the prompt's KV blocks.
    presence_penalty, frequency_penalty: in [-2, 2], counted over generated tokens.
    repetition_penalty: > 0; divides (multiplies) positive (negative) logits of tokens seen in prompt or answer.
    temperature: >= 0; 0 is greedy.  top_p: (0, 1].  top_k: 0 or -1 is off.  min_p: [0, 1].
    seed: makes an answer a function of (seed, child, position) alone; None draws a fresh seed.
    stop: strings that end the text.  stop_token_ids: tokens that end it.
    include_stop_str_in_output: keep the stop string in the text.
    ignore_eos: go on past the model's end-of-sequence tokens.
    max_tokens: generated tokens at most; None is "as many as the context holds".
    min_tokens: end-of-sequence and stop tokens are masked before this many.
    logprobs: number of top log-probabilities per generated token (the sampled one is always given), None is off,
        -1 is the whole vocabulary.
    prompt_logprobs: the same for prompt tokens.
    logprobs_from: index of the first prompt token whose log-probability is wanted; the prefix cache may be used
        up to the token before it.
    detokenize: False leaves text empty.  skip_special_tokens, spaces_between_special_tokens: as in tokenizers.
    bad_words: texts that must not appear.  bad_word_ids: the same as token id lists (filled from bad_words).
    logit_bias: token id -> number in [-100, 100] added to its logit.
    allowed_token_ids: if given, no other token is sampled.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_from: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: list[str] | None = None
    bad_word_ids: list[list[int]] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0
        if self.logit_bias is not None:
            self.logit_bias = _int_keys(self.logit_bias)
        self.verify()

    @property
    def is_greedy(self) -> bool:
        """True when no random number is needed."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, empty when there are none."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    def clone(self) -> SamplingParams:
        """A shallow copy that may be changed without touching the original."""
        return msgspec.structs.replace(self)

    def verify(self) -> None:
        """Check every field. Raises RequestError naming the field, its value and the allowed range."""
        _int_in("n", self.n, 1, MAX_N)
        _float_in("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float_in("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _float_in("repetition_penalty", self.repetition_penalty, 0.0, 1e6, low_open=True)
        _float_in("temperature", self.temperature, 0.0, 100.0)
        _float_in("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _int_in("top_k", self.top_k, 0, 1 << 30)
        _float_in("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _int_in("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.max_tokens is not None:
            _int_in("max_tokens", self.max_tokens, 1, 1 << 31)
        _int_in("min_tokens", self.min_tokens, 0, 1 << 31 if self.max_tokens is None else self.max_tokens)
        if self.logprobs is not None:
            _int_in("logprobs", self.logprobs, -1, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _int_in("prompt_logprobs", self.prompt_logprobs, -1, MAX_LOGPROBS)
        _int_in("logprobs_from", self.logprobs_from, 0, 1 << 31)
        self._verify_stop()
        self._verify_tokens()

    def _verify_stop(self) -> None:
        stop = self.stop_strings
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop strings must be non-empty strings; got {text!r}", param="stop")
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", param="stop")
        for text in self.bad_words or []:
            if not isinstance(text, str) or not text:
                raise RequestError(f"bad_words must be non-empty strings; got {text!r}", param="bad_words")

    def _verify_tokens(self) -> None:
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token in ids or []:
                _int_in(name, token, 0, 1 << 31)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty: nothing could be sampled; leave it out or name at least one token",
                param="allowed_token_ids",
            )
        if self.logit_bias and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for token, bias in (self.logit_bias or {}).items():
            _int_in("logit_bias", token, 0, 1 << 31)
            _float_in("logit_bias", bias, -100.0, 100.0)


def _int_keys(bias: dict[Any, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except (TypeError, ValueError) as error:
        raise RequestError(f"logit_bias keys must be token ids; got {error}", param="logit_bias") from None


def _int_in(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer in [{low}, {high}]; got {value!r}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}]; got {value}", param=name)


def _float_in(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a number in {interval}; got {value!r}", param=name)
    if value < low or value > high or (low_open and value == low):
        raise RequestError(f"{name} must be in {interval}; got {value:g}", param=name)

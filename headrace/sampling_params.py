"""What a request asks of the sampler. Names, defaults and meanings follow vLLM's ``SamplingParams``."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.names import NamedFields
from headrace.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 16_384
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_TOKEN_ID = (1 << 31) - 1

MAX_CANDIDATES = 4096  # tokens a beam search may look at after each beam
_NEUTRAL_FOR_BEAMS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": None,
    "bad_words": None,
    "bad_word_ids": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
}
"""What must stay at its default under beam search."""

_FLAGS = (
    "use_beam_search",
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_SHOWN_CHARS = 80
_OPEN_END = 1 << 30
"""From here on an upper limit is none that a person would think of."""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True, metaclass=NamedFields):
    """How to pick tokens and when to stop.

    n: answers per prompt; they share the prompt's KV blocks.
    best_of: sequences computed, of which the ``n`` with the highest log-probability per token are given (answers then
        carry log-probabilities); with beam search the number of beams. None is n.
    use_beam_search: search for the likeliest answers over ``best_of`` beams instead of sampling; needs temperature 0.
    length_penalty: beam search: an answer's score is its log-probability / length ** length_penalty.
    early_stopping: beam search: True stops at ``best_of`` finished answers, False when no beam looks better than the
        worst of them, "never" when none could become better.
    presence_penalty, frequency_penalty: in [-2, 2], counted over generated tokens.
    repetition_penalty: in [0.01, 100]; divides (multiplies) positive (negative) logits of tokens seen in prompt or
        answer.
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
    detokenize: False leaves text empty.  skip_special_tokens: as in tokenizers.
    spaces_between_special_tokens: changes nothing, since no tokenizer here puts spaces between special tokens.
    bad_words: texts that must not appear.  bad_word_ids: the same as token id lists (filled from bad_words).
    logit_bias: token id -> number in [-100, 100] added to its logit.
    allowed_token_ids: if given, no other token is sampled.
    structured_outputs: what the answer's text must be (a JSON schema, a regex, a grammar, choices).
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
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
    structured_outputs: StructuredOutputsParams | None = None

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
    def num_sequences(self) -> int:
        """Sequences computed at once: ``best_of``, else ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_told_answers(self) -> int:
        """Answers that the engine core gives news of: a beam search tells the ``n`` best only, at its end."""
        return self.n if self.use_beam_search else self.num_sequences

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
        if self.best_of is not None:
            _int_in("best_of", self.best_of, self.n, MAX_N)
        _float_in("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float_in("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Further from 1 the logits leave the range that the sampler can tell apart, and at last that of fp32.
        _float_in("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _float_in("temperature", self.temperature, 0.0, 100.0)
        _float_in("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _int_in("top_k", self.top_k, 0, 1 << 30)
        _float_in("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _int_in("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.max_tokens is not None:
            _int_in("max_tokens", self.max_tokens, 1, 1 << 31)
        self._verify_min_tokens()
        if self.logprobs is not None:
            most = MAX_CANDIDATES if self.use_beam_search else MAX_LOGPROBS
            _int_in("logprobs", self.logprobs, -1, most)
        if self.prompt_logprobs is not None:
            _int_in("prompt_logprobs", self.prompt_logprobs, -1, MAX_LOGPROBS)
        _int_in("logprobs_from", self.logprobs_from, 0, 1 << 31)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "True or False")
        self._verify_stop()
        self._verify_tokens()
        self._verify_beams()
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise _refusal("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")
            self.structured_outputs.verify()

    def _verify_min_tokens(self) -> None:
        _int_in("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must not be above max_tokens, which is {self.max_tokens}; got {self.min_tokens}",
                param="min_tokens",
            )
        if self.min_tokens and self.structured_outputs is not None:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but structured_outputs says where the answer may end: leave one of "
                "them out",
                param="min_tokens",
            )

    def _verify_stop(self) -> None:
        if self.stop is not None and self.stop != []:
            _texts("stop", self.stop_strings)
            if len(self.stop_strings) > MAX_STOP_STRINGS:
                raise RequestError(
                    f"stop has {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed",
                    param="stop",
                )
            num_chars = sum(map(len, self.stop_strings))
            if num_chars > MAX_STOP_CHARS:
                raise RequestError(
                    f"stop has {num_chars} characters in all; at most {MAX_STOP_CHARS} are allowed",
                    param="stop",
                )
            if not self.detokenize:
                raise RequestError(
                    "stop strings need detokenize=True; use stop_token_ids instead", param="stop"
                )
        if self.bad_words is not None:
            _texts("bad_words", self.bad_words)
            num_words, num_chars = len(self.bad_words), sum(map(len, self.bad_words))
            if num_words > MAX_BAD_WORDS or num_chars > MAX_STOP_CHARS:
                raise RequestError(
                    f"bad_words has {num_words} words of {num_chars} characters in all; at most {MAX_BAD_WORDS} of "
                    f"{MAX_STOP_CHARS} are allowed",
                    param="bad_words",
                )

    def _verify_beams(self) -> None:
        _float_in("length_penalty", self.length_penalty, -100.0, 100.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _refusal("early_stopping", self.early_stopping, 'True, False or "never"')
        if not self.use_beam_search:
            return
        for name, neutral in _NEUTRAL_FOR_BEAMS.items():
            value = getattr(self, name)
            if value != neutral and value not in (None, [], {}):
                given = f"{name} is {_shown(value)}" if isinstance(value, int | float) else f"{name} is given"
                remedy = f"leave {name} out" if neutral is None else f"leave {name} at {neutral:g}"
                raise RequestError(
                    f"{given}, but beam search follows the model's own probabilities: {remedy}, or use_beam_search",
                    param=name,
                )

    def _verify_tokens(self) -> None:
        if self.stop_token_ids is not None:
            _token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty: nothing could be sampled; leave it out or name at least one token",
                    param="allowed_token_ids",
                )
        if self.bad_word_ids is not None:
            if not isinstance(self.bad_word_ids, list):
                raise _refusal("bad_word_ids", self.bad_word_ids, "a list of lists of token ids")
            for word in self.bad_word_ids:
                _token_ids("bad_word_ids", word, "a list of lists of token ids")
                if not word:
                    raise RequestError(
                        "bad_word_ids has an empty list: name at least one token", param="bad_word_ids"
                    )
        if self.logit_bias is not None:
            self._verify_logit_bias(self.logit_bias)

    def _verify_logit_bias(self, biases: dict[int, float]) -> None:
        if not isinstance(biases, dict):
            raise _refusal("logit_bias", biases, "a dict from token id to number")
        if len(biases) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(biases)} entries; at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for token, bias in biases.items():
            _int_in("logit_bias", token, 0, MAX_TOKEN_ID, at=" keys")
            _float_in("logit_bias", bias, -100.0, 100.0, at=f"[{token}]")


def _int_keys(biases: Any) -> Any:
    """The biases with keys as whole numbers: JSON knows strings only. What is no dict is left to ``verify``."""
    if not isinstance(biases, dict):
        return biases
    keys: dict[Any, Any] = {}
    for token, bias in biases.items():
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10:
            token = int(token)
        elif isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(
                f"logit_bias keys must be token ids (whole numbers, or strings of digits); got {_shown(token)}",
                param="logit_bias",
            )
        if token in keys:
            raise RequestError(f"logit_bias names the token {token} twice: name it once", param="logit_bias")
        keys[token] = bias
    return keys


def _texts(name: str, texts: Any) -> None:
    if not isinstance(texts, list):
        raise _refusal(name, texts, "a list of non-empty strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refusal(name, text, "a list of non-empty strings", "the item ")


def _token_ids(name: str, ids: Any, wanted: str = "a list of token ids") -> None:
    if not isinstance(ids, list):
        raise _refusal(name, ids, wanted)
    for token in ids:
        _int_in(name, token, 0, MAX_TOKEN_ID)


def _int_in(name: str, value: Any, low: int, high: int, at: str = "") -> None:
    is_open = low >= 0 and high >= _OPEN_END
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refusal(
            name, value, f"an integer {f'from {low} up' if is_open else f'in [{low}, {high}]'}", at=at
        )
    if not low <= value <= high:
        wanted = f"at least {low}" if value < low else f"at most {high}"
        raise _refusal(name, value, wanted if is_open else f"in [{low}, {high}]", at=at)


def _float_in(name: str, value: Any, low: float, high: float, low_open: bool = False, at: str = "") -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Not a number and the infinities fail the comparison, too.
    if not is_number or not low <= value <= high or (low_open and value == low):
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        finite = is_number and (isinstance(value, int) or math.isfinite(value))
        raise _refusal(name, value, f"in {interval}" if finite else f"a number in {interval}", at=at)


def _refusal(name: str, value: Any, wanted: str, where: str = "", at: str = "") -> RequestError:
    return RequestError(f"{name}{at} must be {wanted}; got {where}{_shown(value)}", param=name)


def _shown(value: Any) -> str:
    """``value`` for a message, cut short; whole numbers of thousands of digits have no text at all."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"

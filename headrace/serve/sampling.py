"""From a request's fields to SamplingParams."""

from __future__ import annotations

from typing import Any

from headrace.sampling_params import MAX_LOGPROBS, SamplingParams
from headrace.serve.errors import bad_request
from headrace.serve.field_names import FieldNames
from headrace.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from headrace.serve.structured import constraint_names, structured_params

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "logprobs_from",
)
_DEFAULT_COMPLETION_TOKENS = 16


def field_names(request: GenerationRequest) -> FieldNames:
    """What this request calls the fields of SamplingParams and of its prompt."""
    names = {}
    if request.best_of is not None and not request.use_beam_search:
        names["n"] = "best_of"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    params = {"prompt": "messages"} if isinstance(request, ChatRequest) else {}
    return constraint_names(request).then(FieldNames(names, params))


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Parameters of a text completion. ``max_tokens`` 0 asks for the prompt alone: one token is computed, none given.

    Raises: RequestError, ApiError 400.
    """
    max_tokens = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens < 0:
        raise bad_request(f"max_tokens must be at least 0; got {max_tokens}", "max_tokens")
    if max_tokens == 0 and request.min_tokens:
        raise bad_request("min_tokens must not be above max_tokens, which is 0", "min_tokens")
    fields: dict[str, Any] = {"max_tokens": max_tokens or 1}
    if request.logprobs is not None:
        _check_count("logprobs", request.logprobs)
        fields["logprobs"] = request.logprobs
        if request.echo:
            fields["prompt_logprobs"] = request.logprobs
    return _params(request, fields)


def chat_params(request: ChatRequest) -> SamplingParams:
    """Parameters of a chat completion. Raises: RequestError, ApiError 400."""
    limit = request.max_completion_tokens
    fields: dict[str, Any] = {"max_tokens": request.max_tokens if limit is None else limit}
    if request.top_logprobs is not None:
        _check_count("top_logprobs", request.top_logprobs)
        if not request.logprobs and request.top_logprobs:
            raise bad_request("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    return _params(request, fields)


def _sequence_fields(request: GenerationRequest, fields: dict[str, Any]) -> dict[str, Any]:
    """How many sequences are computed: beams, or so many answers of which the best are shown."""
    n = 1 if request.n is None else request.n
    best_of = n if request.best_of is None else request.best_of
    if best_of < n:
        raise bad_request(f"best_of must be at least n ({n}); got {best_of}", "best_of")
    if request.use_beam_search:
        temperature = 0.0 if request.temperature is None else request.temperature
        found: dict[str, Any] = {
            "use_beam_search": True,
            "best_of": request.best_of,
            "temperature": temperature,
        }
        for name in ("length_penalty", "early_stopping"):
            if getattr(request, name) is not None:
                found[name] = getattr(request, name)
        return found
    # all of them are counted in the usage, so the server takes all and ranks them itself
    return {"n": best_of, **({"logprobs": 0} if best_of > n and "logprobs" not in fields else {})}


def _check_count(name: str, value: int) -> None:
    if not 0 <= value <= MAX_LOGPROBS:
        raise bad_request(f"{name} must be in [0, {MAX_LOGPROBS}]; got {value}", name)


def _params(request: GenerationRequest, fields: dict[str, Any]) -> SamplingParams:
    fields |= _sequence_fields(request, fields)
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields.setdefault(name, value)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not available in a stream", "prompt_logprobs")
    fields["structured_outputs"] = structured_params(request)
    return SamplingParams(**fields)

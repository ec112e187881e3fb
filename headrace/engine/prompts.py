"""The forms in which users give prompts, brought to one. The forms are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = 'a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}'


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """One prompt as text, token ids, or both (then the ids count and the text is for show).

    cache_salt: prompts share cached prefixes only with those of the same salt.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""


def split_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The single prompts of a batch; a string, a mapping or a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"a prompt must be {_FORMS}; got {type(prompts).__name__}", param="prompt")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # all its items are integers: one prompt
    return list(prompts)  # type: ignore[arg-type]


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Bring one prompt to text or token ids.

    Raises: RequestError for an unknown form or key, and for ids that are no integers.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return ParsedPrompt(None, _checked_ids(prompt))
    raise RequestError(f"a prompt must be {_FORMS}; got {type(prompt).__name__}", param="prompt")


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key, value in prompt.items():
        if key not in _KEYS and value is not None:
            raise RequestError(
                f"prompt key {key!r} is not supported; known: {', '.join(_KEYS)}", param="prompt"
            )
    text, ids, salt = (prompt.get(key) for key in _KEYS)
    if text is None and ids is None:
        raise RequestError(f"a prompt must be {_FORMS}; got neither key", param="prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt text must be a string; got {type(text).__name__}", param="prompt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string; got {type(salt).__name__}", param="cache_salt")
    return ParsedPrompt(
        text,
        None if ids is None else _checked_ids(ids),
        salt or "",
    )


def _checked_ids(ids: Any) -> list[int]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RequestError(f"token ids must be a list of integers; got {type(ids).__name__}", param="prompt")
    if set(map(type, ids)) <= {int}:  # one pass in C; booleans are not integers here
        return list(ids)
    index, wrong = next((i, value) for i, value in enumerate(ids) if type(value) is not int)
    raise RequestError(f"token ids must be integers; got {wrong!r} at position {index}", param="prompt")

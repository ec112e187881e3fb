"""Log-probabilities in the forms that OpenAI's two APIs give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.outputs import Logprob
from headrace.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity; this is what OpenAI sends for a banned token

Entry = dict[int, Logprob]


class TokenNames:
    """How tokens are named in answers.

    Args:
        as_ids: name them "token_id:17" instead of by their text (``return_tokens_as_token_ids``).
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def own(self, token: int, logprob: Logprob | None) -> str:
        """The token that stands at a place: the characters it gave to the text there."""
        if self.as_ids:
            return f"token_id:{token}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.other(token)

    def other(self, token: int) -> str:
        """A token by itself. A part of a character is spelled by its bytes, as OpenAI does."""
        if self.as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token: int) -> list[int] | None:
        """The token's bytes; None without a tokenizer."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


class CompletionLogprobs:
    """Collects the four lists of /v1/completions.

    Args:
        num_top: how many of the likeliest tokens each entry shows; the token itself is always among them.
    """

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._offset = 0  # characters of the answer so far
        self._new_lists()

    def _new_lists(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> None:
        """Append tokens with their entries; None where there is no probability (a text's first token)."""
        for token, entry in zip(token_ids, entries, strict=True):
            own = entry[token] if entry is not None else None
            self.add_named(self._names.own(token, own), token, entry)

    def add_named(self, name: str, token: int, entry: Entry | None) -> None:
        """Append one token under a given name."""
        self._tokens.append(name)
        self._offsets.append(self._offset)
        self._offset += len(name)
        if entry is None:
            self._values.append(None)
            self._tops.append(None)
            return
        self._values.append(_finite(entry[token].logprob))
        top = {name: _finite(entry[token].logprob)}
        for other, logprob in entry.items():
            if other != token and (logprob.rank or 0) <= self._num_top:
                top.setdefault(self._names.other(other), _finite(logprob.logprob))
        self._tops.append(top)

    def take(self) -> dict[str, Any]:
        """The lists since the last call."""
        lists = {
            "text_offset": self._offsets,
            "token_logprobs": self._values,
            "tokens": self._tokens,
            "top_logprobs": self._tops,
        }
        self._new_lists()
        return lists


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], entries: Sequence[Entry], num_top: int
) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice."""
    return {
        "content": [
            _chat_entry(names, token, entry, num_top) for token, entry in zip(token_ids, entries, strict=True)
        ],
        "refusal": None,
    }


def _chat_entry(names: TokenNames, token: int, entry: Entry, num_top: int) -> dict[str, Any]:
    def item(other: int) -> dict[str, Any]:
        name = names.own(token, entry[token]) if other == token else names.other(other)
        return {"token": name, "logprob": _finite(entry[other].logprob), "bytes": names.bytes_of(other)}

    ranked = sorted((o for o in entry if (entry[o].rank or 0) <= num_top), key=lambda o: entry[o].rank or 0)
    return {**item(token), "top_logprobs": [item(other) for other in ranked]}


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each prompt token {token id: logprob, rank, text}, None for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token, logprob in entry.items()
        }
        for entry in entries
    ]


def _finite(value: float) -> float:
    return max(value, _LOWEST)

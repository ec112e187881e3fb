"""PromptEcho: the prompt as the first part of an answer, with a name for each of its tokens."""

from __future__ import annotations

from headrace.outputs import RequestOutput
from headrace.serve.logprobs import CompletionLogprobs, TokenNames
from headrace.tokenizer import Tokenizer
from headrace.tokenizer.detokenizer import IncrementalDetokenizer


class PromptEcho:
    """Gives prompts back; a prompt of token ids as its text."""

    def __init__(self, tokenizer: Tokenizer | None, names: TokenNames) -> None:
        self._tokenizer = tokenizer
        self._names = names

    def text(self, output: RequestOutput) -> str:
        """The prompt's text."""
        if output.prompt is not None:
            return output.prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(output.prompt_token_ids, False)

    def add_logprobs(self, lists: CompletionLogprobs, output: RequestOutput) -> None:
        """Append the prompt's tokens. Their names join to its text; one that the tokenizer put before it has none."""
        ids = output.prompt_token_ids
        entries = output.prompt_logprobs or [None] * len(ids)
        for name, token, entry in zip(self._token_names(output), ids, entries, strict=True):
            lists.add_named(name, token, entry)

    def _token_names(self, output: RequestOutput) -> list[str]:
        ids, tokenizer = output.prompt_token_ids, self._tokenizer
        if tokenizer is None or self._names.as_ids:
            return [self._names.other(token) for token in ids]
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        detokenizer.append(ids)
        detokenizer.flush()
        names = list(detokenizer.token_texts)
        is_added = ids[0] in tokenizer.special_ids and output.prompt is not None
        if is_added and not (output.prompt or "").startswith(names[0]):
            names[0] = ""
        return names

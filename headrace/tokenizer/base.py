"""Tokenizer: text to token ids and back, and messages to prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.tokenizer.chat_messages import normalise_messages
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.length_bound import LengthBound
from headrace.tokenizer.token_bytes import TokenBytes, rules_from_decoder

if TYPE_CHECKING:
    import tokenizers

# Above this, the library's batch call is used: it lets other threads run meanwhile, and takes half the time.
_LONG_TEXT_CHARS = 20_000

NO_CHAT_TEMPLATE = "no_chat_template"
"""``code`` of the RequestError for messages to a model that has no template."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The named special tokens and the chat templates that come with a tokenizer.

    Attributes:
        bos_token_id, eos_token_id: ids, or None.
        texts: what templates may print, by name ("bos_token": "<s>").
        chat_templates: template source by name; the one in normal use is "default".
    """

    bos_token_id: int | None
    eos_token_id: int | None
    texts: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """One tokenizer, whatever file it came from. Safe to use from several threads.

    Attributes:
        bos_token_id, eos_token_id: ids, or None.
        special_ids: ids that decoding leaves out when told to skip special tokens.
        vocab_size: one more than the highest id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens, where: str) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._special = special
        self._templates: dict[str, ChatTemplate] = {}
        self._length_bound: LengthBound | None = None
        self.bos_token_id = special.bos_token_id
        self.eos_token_id = special.eos_token_id
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._rules = rules_from_decoder(json.loads(state), where)
        contents = {token_id: token.content for token_id, token in added.items()}
        self._all_bytes, self._visible_bytes = (
            TokenBytes(self._rules, backend.id_to_token, contents, hidden, self.vocab_size)
            for hidden in (frozenset[int](), self.special_ids)
        )

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first space is dropped on decoding, because encoding puts one there."""
        return self._rules.strips_first_space

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source, or None when the model has none."""
        return self._special.chat_templates.get("default")

    def template_source(self, has_tools: bool) -> str | None:
        """The source of the template that a conversation gets; some models have another one for tools."""
        return self._special.chat_templates.get(self._template_name(has_tools))

    def _template_name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._special.chat_templates else "default"

    def is_special_text(self, text: str) -> bool:
        """Whether ``text`` is a special token, which decoding leaves out when told to skip them."""
        return self._backend.token_to_id(text) in self.special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        Raises:
            RequestError: the text is not valid Unicode (it has lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate (\\u{ord(text[error.start]):04x}) at character {error.start}, which "
                "is no character: send valid Unicode",
                param="prompt",
            ) from None
        if len(text) > _LONG_TEXT_CHARS:
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def min_num_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` surely has, found without encoding it; 0 where nothing is sure."""
        if self._length_bound is None:
            self._length_bound = LengthBound(self._backend, self._rules)
        return self._length_bound.min_num_tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary add nothing."""
        table = self.byte_table(skip_special_tokens)
        data = b"".join([table[token_id] for token_id in ids])
        if self.strips_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def byte_table(self, skip_special_tokens: bool) -> TokenBytes:
        """Token id -> bytes, with special tokens empty if they are to be skipped."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, special ones included; b"" for an id without a token."""
        return self._all_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token as text by itself, special ones included; a part of a character shows as U+FFFD."""
        return self._all_bytes[token_id].decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation; encode it with ``add_special_tokens=False``.

        ``chat_template`` replaces the model's own; ``kwargs`` become variables of the template. With
        ``continue_final_message`` the prompt ends right after the last message's content.

        Raises:
            RequestError: the messages are malformed, the model has no template, or the template refuses them or
                fails; the message carries the template's own words.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true: the first goes on with the "
                "last message, the second starts a new one; set add_generation_prompt to false",
                param="continue_final_message",
            )
        tools = _objects("tools", tools)
        documents = _objects("documents", documents)
        template = self._template(chat_template, has_tools=tools is not None)
        variables = dict(self._special.texts) | kwargs
        plain = normalise_messages(messages)
        if continue_final_message:
            return template.render_to_continue(plain, tools=tools, documents=documents, variables=variables)
        return template.render(
            plain,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def _template(self, override: str | None, has_tools: bool) -> ChatTemplate:
        if override is not None:
            if not isinstance(override, str):
                raise RequestError(
                    f"chat_template must be a template's text; got {type(override).__name__}",
                    param="chat_template",
                )
            return ChatTemplate(override)
        self.require_chat_template(has_tools)
        name = self._template_name(has_tools)
        template = self._templates.get(name)
        if template is None:
            template = self._templates[name] = ChatTemplate(self._special.chat_templates[name])
        return template

    def require_chat_template(self, has_tools: bool = False) -> None:
        """Raises RequestError if the model has no template for conversations."""
        if self.template_source(has_tools) is None:
            raise RequestError(
                "this model has no chat template, as base models have none: give it a plain prompt (generate, "
                "/v1/completions), or bring a template as chat_template (chat, /v1/chat/completions)",
                param="messages",
                code=NO_CHAT_TEMPLATE,
            )


def _objects(name: str, values: Any) -> list[Mapping[str, Any]] | None:
    """A list of objects as it came, or None for an empty or absent one."""
    if values is None:
        return None
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise RequestError(f"{name} must be a list of objects; got {type(values).__name__}", param=name)
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}[{index}] must be an object; got {type(value).__name__}", param=name)
    return list(values) or None

"""OpenAIBackend: programs over any server with OpenAI's API, as far as that goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.lang.backend import Backend, Generated, GenSpec
from headrace.lang.conversation import Conversation
from headrace.lang.http_client import HttpClient
from headrace.lang.scoring import num_shared


class OpenAIBackend(Backend):
    """What is different from Headrace:

    * ``select`` asks the model to write and takes the choice that its text begins with, or that begins like it; scores
      are numbers of matching characters, not log-probabilities, and a text that matches no choice is an error.
    * ``gen`` in the middle of an assistant's turn is an error: OpenAI's chat cannot go on with one.
    * ``regex`` and ``choices`` are errors; ``json`` becomes ``response_format``.
    * No prefix is cached ahead.

    Args:
        client: of the server.
        model: the name it serves.
    """

    is_exact = False

    def __init__(self, client: HttpClient, model: str) -> None:
        super().__init__()
        self._client = client
        self._model = model

    async def generate(
        self, conversation: Conversation, spec: GenSpec, on_text: Callable[[str], None] | None = None
    ) -> Generated:
        """See ``Backend``. Raises RequestError for what this API cannot do."""
        path, body = self._request(conversation, spec)
        if on_text is None:
            answer = await self._client.post(path, body)
            (choice,) = answer["choices"]
            usage = answer.get("usage") or {}
            return Generated(
                _text(choice, "message"), choice["finish_reason"], usage.get("completion_tokens")
            )
        parts: list[str] = []
        reason = ["stop"]

        def take(event: Any) -> None:
            for choice in event["choices"]:
                text = _text(choice, "delta")
                if text:
                    parts.append(text)
                    on_text(text)
                reason[0] = choice.get("finish_reason") or reason[0]

        await self._client.stream(path, body, take)
        return Generated("".join(parts), reason[0])

    def _request(self, conversation: Conversation, spec: GenSpec) -> tuple[str, dict[str, Any]]:
        fields = {key: value for key, value in spec.fields().items() if value is not None}
        body: dict[str, Any] = {"model": self._model, **fields}
        if "json" in spec.constraint:
            schema = {"name": "answer", "schema": spec.constraint["json"], "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif spec.constraint:
            raise RequestError(
                f"{next(iter(spec.constraint))} constraints are not part of OpenAI's API: use json, or a server of "
                "Headrace's"
            )
        if not conversation.messages:
            return "/v1/completions", {**body, "prompt": conversation.text}
        if conversation.has_begun_turn:
            raise RequestError(
                "OpenAI's chat cannot go on in the middle of an assistant's turn: let gen stand first in it, or use a "
                "Headrace server"
            )
        return "/v1/chat/completions", {**body, "messages": conversation.prompt_messages}

    async def score(self, conversation: Conversation, choices: Sequence[str]) -> list[float]:
        """Numbers of characters that the model's own text shares with each choice. Raises RequestError if none."""
        longest = max(len(choice) for choice in choices)
        answer = await self.generate(conversation, GenSpec(max_tokens=longest))
        text = answer.text.strip()
        scores = [float(num_shared(text, choice.strip())) for choice in choices]
        if not any(scores):
            raise RequestError(
                f"the model wrote {text!r:.100}, which begins like none of {list(choices)!r:.200}"
            )
        return scores

    async def warm(self, conversation: Conversation) -> None:
        """Nothing to do."""

    async def close_model(self) -> None:
        """The server lives on."""
        self._client.close()


def _text(choice: dict[str, Any], part: str) -> str:
    return (choice["text"] if "text" in choice else (choice.get(part) or {}).get("content")) or ""

"""ServerBackend: programs over a Headrace server. What they compute is the same as in process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.lang.backend import Backend, Generated, GenSpec
from headrace.lang.conversation import Conversation
from headrace.lang.http_client import HttpClient
from headrace.lang.scoring import scoring_batch


class ServerBackend(Backend):
    """The server makes tokens of conversations, and answers and scores them by their tokens.

    Args:
        client: of the server.
        model: the name it serves.
    """

    def __init__(self, client: HttpClient, model: str) -> None:
        super().__init__()
        self._client = client
        self._model = model

    async def generate(
        self, conversation: Conversation, spec: GenSpec, on_text: Callable[[str], None] | None = None
    ) -> Generated:
        """See ``Backend``. Raises RequestError, EngineDeadError."""
        fields = {key: value for key, value in spec.fields().items() if value is not None}
        body: dict[str, Any] = {"model": self._model, "prompt": await self._tokens(conversation), **fields}
        if spec.max_tokens is None:
            (card,) = (await self._client.get("/v1/models"))["data"]
            body["max_tokens"] = max(card["max_model_len"] - len(body["prompt"]), 1)
        if spec.constraint:
            body["structured_outputs"] = spec.constraint
        if on_text is None:
            answer = await self._client.post("/v1/completions", body)
            (choice,) = answer["choices"]
            return Generated(choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])
        return await self._streamed(body, on_text)

    async def _streamed(self, body: dict[str, Any], on_text: Callable[[str], None]) -> Generated:
        parts: list[str] = []
        reason = ["stop"]
        num_tokens: list[int] = []

        def take(event: Any) -> None:
            for choice in event["choices"]:
                if choice["text"]:
                    parts.append(choice["text"])
                    on_text(choice["text"])
                reason[0] = choice["finish_reason"] or reason[0]
            if event.get("usage"):
                num_tokens.append(event["usage"]["completion_tokens"])

        options = {"stream_options": {"include_usage": True}}
        await self._client.stream("/v1/completions", {**body, **options}, take)
        return Generated("".join(parts), reason[0], num_tokens[-1] if num_tokens else None)

    async def score(self, conversation: Conversation, choices: Sequence[str]) -> list[float]:
        """See ``Backend``: one request with all choices."""
        context = await self._tokens(conversation)
        joined = [await self._tokens(conversation.append(choice)) for choice in choices]
        batch = scoring_batch(context, joined)
        body = {
            "model": self._model,
            "prompt": batch.prompts,
            "max_tokens": 0,
            "temperature": 0,
            "prompt_logprobs": 0,
            "logprobs_from": batch.logprobs_from,
        }
        answer = await self._client.post("/v1/completions", body)
        found = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        logprobs = []
        for choice, ids in zip(found, batch.prompts, strict=True):
            entries = choice["prompt_logprobs"][batch.logprobs_from :]
            own = zip(ids[batch.logprobs_from :], entries, strict=True)
            logprobs.append([entry[str(token)]["logprob"] for token, entry in own])
        return batch.means(logprobs)

    async def warm(self, conversation: Conversation) -> None:
        """See ``Backend``."""
        tokens = await self._tokens(conversation)
        if tokens:
            await self._client.post(
                "/v1/completions", {"model": self._model, "prompt": tokens, "max_tokens": 1}
            )

    async def close_model(self) -> None:
        """The server lives on."""
        self._client.close()

    async def _tokens(self, conversation: Conversation) -> list[int]:
        body: dict[str, Any] = {"model": self._model}
        if conversation.messages:
            goes_on = conversation.has_begun_turn
            body["messages"] = conversation.prompt_messages
            body["continue_final_message"] = goes_on
            body["add_generation_prompt"] = conversation.is_open and not goes_on
        else:
            body["prompt"] = conversation.text
        answer = await self._client.post("/tokenize", body)
        tokens: list[int] = answer["tokens"]
        return tokens

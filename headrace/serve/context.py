"""ServerContext: what every route needs: the engine, the model's name, and whether requests are taken now."""

from __future__ import annotations

import asyncio
import time

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.front_end import FrontEnd
from headrace.errors import RequestError
from headrace.serve.errors import ApiError, bad_request
from headrace.serve.settings import ServerConfig
from headrace.tokenizer import Tokenizer


class ServerContext:
    """State of one server."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.start_time = int(time.time())
        self.is_draining = False

    async def admit(self) -> FrontEnd:
        """Wait until the engine takes requests, within limits.

        Raises: ApiError 503 when the server is ending or still loading; what ended the engine.
        """
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"}
            )
        self.llm.check_alive()
        if not self.llm.is_ready:
            try:
                async with asyncio.timeout(self.config.load_wait_s):
                    await self.llm.wait_ready()
            except TimeoutError:
                stage = self.llm.progress
                raise ApiError(
                    503,
                    f"the model is still loading ({stage.stage}, {stage.share:.0%}); try again later",
                    code="loading",
                    headers={"Retry-After": "10"},
                ) from None
        return await self.llm.front_end()

    async def model_name(self) -> str:
        """The name that clients use."""
        name = self.llm.config.model.served_model_name
        return name if name is not None else (await self.llm.front_end()).source.name

    async def max_model_len(self) -> int:
        """Prompt plus answer, in tokens: the model's limit and, once the engine is loaded, what its memory holds."""
        most: int = (await self.llm.front_end()).max_model_len
        held: int = self.llm.metrics.core_stats.get("max_request_tokens", most)
        return min(most, held)

    async def check_model(self, wanted: str | None) -> str:
        """The model's name, if ``wanted`` is it or left out. Raises RequestError (404)."""
        name = await self.model_name()
        if wanted is not None and wanted != name:
            raise RequestError(
                f"the model {wanted!r} does not exist here; this server has {name!r}",
                param="model",
                code="model_not_found",
            )
        return name


def tokenizer_of(front_end: FrontEnd) -> Tokenizer:
    """The tokenizer. Raises ApiError 400 on a server that deals in token ids only."""
    if front_end.tokenizer is None:
        raise bad_request("this server has no tokenizer (skip_tokenizer_init): it takes token ids only")
    return front_end.tokenizer

"""Online runs of ``headrace bench``: the same requests over HTTP, each streamed, from one event loop."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from headrace.cli.refusal import reason, refusal
from headrace.cli.workload import WorkloadRequest
from headrace.errors import EngineDeadError, RequestError
from headrace.outputs import CompletionOutput, RequestMetrics, RequestOutput
from headrace.server_address import server_address

_LINE_BYTES = 1 << 20
_REFUSED = 400


class ServedModel(NamedTuple):
    """A server's name for a model, and the tokens that prompt and answer may have together; None: it does not say."""

    name: str
    max_model_len: int | None


class Server:
    """An OpenAI server's completions, by its address with or without "/v1". Raises RequestError for a wrong one."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._key_line = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        parts = server_address(base_url)
        self._address = parts.geturl()
        self._host, self._path = parts.hostname or "", parts.path
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)

    async def model(self, wanted: str | None = None) -> ServedModel:
        """The model of that name, or the first that it serves. Raises RequestError if it has none such."""
        text = b"".join([line async for line in self._lines("GET", "/v1/models", None)])
        try:
            cards = [(str(card["id"]), card.get("max_model_len")) for card in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError(
                f"{self._address}/v1/models lists no models: give an OpenAI server's address with --base-url"
            ) from None
        models = [ServedModel(name, length if type(length) is int else None) for name, length in cards]
        if not models:
            raise RequestError("the server serves no model")
        for model in models:
            if wanted in (None, model.name):
                return model
        names = ", ".join(model.name for model in models)
        raise RequestError(
            f"the server does not serve {wanted!r}; it has: {names} (without MODEL the first is taken)",
            param="model",
        )

    async def complete(self, body: dict[str, Any]) -> list[float]:
        """Times at which the answer's tokens came (monotonic seconds). Several tokens of one event have one time.

        Where events do not say how many tokens there are so far, each with text counts as one, and those that the end
        says there were beside came with the last.
        """
        times: list[float] = []
        count = 0
        async for line in self._lines("POST", "/v1/completions", body):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if event.get("error"):
                raise RequestError(f"the server ended an answer: {reason(data)}")
            usage = (event.get("usage") or {}).get("completion_tokens")
            has_text = any(choice.get("text") for choice in event.get("choices") or [])
            count = usage if usage is not None else count + has_text
            times += [time.monotonic()] * (count - len(times))
        return times

    async def _lines(self, method: str, path: str, body: Any) -> AsyncIterator[bytes]:
        """Lines of the answer's body. Raises RequestError for a refusal, EngineDeadError when nobody answers."""
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"{self._key_line}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, limit=_LINE_BYTES, ssl=self._is_tls or None
            )
        except OSError as error:
            raise EngineDeadError(f"{self._host}:{self._port} cannot be reached: {error}") from None
        try:
            writer.write(head.encode() + data)
            await writer.drain()
            status = _status(await reader.readline(), self._address)
            is_chunked = False
            while header := (await reader.readline()).strip().lower():
                is_chunked |= header.startswith(b"transfer-encoding:") and b"chunked" in header
            if status >= _REFUSED:
                raise RequestError(refusal(f"{self._address}{path}", status, await _body(reader, is_chunked)))
            async for line in _chunked(reader) if is_chunked else reader:
                yield line
        finally:
            writer.close()


def _status(line: bytes, address: str) -> int:
    """The status of an answer's first line. Raises EngineDeadError for what is no HTTP."""
    words = line.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise EngineDeadError(f"{address} does not answer as an HTTP server does: {line[:60]!r}")
    return int(words[1])


async def _body(reader: asyncio.StreamReader, is_chunked: bool) -> bytes:
    return b"".join([line async for line in _chunked(reader)]) if is_chunked else await reader.read()


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a body that comes in chunks."""
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


async def run_online(
    server: Server,
    requests: list[WorkloadRequest],
    temperature: float,
    salt: str,
    request_rate: float | None = None,
    model: str | None = None,
) -> tuple[list[RequestOutput], float]:
    """Send the requests, all at once or ``request_rate`` a second at random times, and take in their streams.

    All prompts of a run begin with an id that ``salt`` picks, as servers that know no cache_salt would find those of
    an earlier run.

    Args:
        model: the name that the server gives it; its first by default.

    Returns: (outputs with their times, seconds from the first request to the last answer).
    Raises: RequestError if an answer has not all its tokens, or the server has no such model.
    """
    name = (await server.model(model)).name
    rng = random.Random(0)
    first_id = random.Random(salt).choice([i for request in requests for i in request.prompt_ids] or [0])
    start = time.monotonic()
    delay_s, tasks = 0.0, []
    for index, request in enumerate(requests):
        body = {
            "model": name,
            "prompt": [first_id, *request.prompt_ids[1:]],
            "max_tokens": request.output_len,
            "temperature": temperature,
            "seed": index,
            "ignore_eos": True,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        tasks.append(asyncio.create_task(_one(server, request, body, delay_s)))
        delay_s += rng.expovariate(request_rate) if request_rate else 0.0
    outputs = await asyncio.gather(*tasks)
    return outputs, time.monotonic() - start


async def _one(
    server: Server, request: WorkloadRequest, body: dict[str, Any], delay_s: float
) -> RequestOutput:
    await asyncio.sleep(delay_s)
    arrival = time.monotonic()
    times = await server.complete(body)
    if len(times) != request.output_len:
        raise RequestError(f"an answer has {len(times)} of {request.output_len} tokens")
    answer = CompletionOutput(0, "", [0] * len(times), finish_reason="length")
    metrics = RequestMetrics(arrival, token_times=[times])
    return RequestOutput(str(body["seed"]), None, request.prompt_ids, [answer], True, metrics=metrics)

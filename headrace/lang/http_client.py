"""HttpClient: JSON over HTTP from the standard library, in threads, for an event loop."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.errors import EngineDeadError, RequestError
from headrace.server_address import server_address

_MAX_CONNECTIONS = 64


class HttpClient:
    """Talks to one server. Each call has a connection of its own.

    Args:
        base_url: with or without "/v1". Raises RequestError for a wrong one.
        api_key: sent as a bearer token.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float = 600.0) -> None:
        self._parts = server_address(base_url)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MAX_CONNECTIONS, "headrace-lang-http")

    async def get(self, path: str) -> Any:
        """GET. Raises RequestError for a refusal, EngineDeadError when there is no server."""
        return await self._in_thread(lambda: self._whole("GET", path, None))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST; raises as ``get`` does."""
        return await self._in_thread(lambda: self._whole("POST", path, body))

    async def stream(self, path: str, body: dict[str, Any], on_event: Callable[[Any], None]) -> None:
        """POST, and tell of each event of the answer, in a thread. Raises as ``get`` does."""

        def read() -> None:
            for event in self._events(path, {**body, "stream": True}):
                on_event(event)

        await self._in_thread(read)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (OSError, http.client.HTTPException) as error:
            raise EngineDeadError(f"{self._parts.geturl()} cannot be reached: {error!r}") from None

    def _open(
        self, method: str, path: str, body: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._parts.path + path, data, self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read().decode("utf-8", "replace")
            connection.close()
            raise _refusal(answer.status, text)
        return connection, answer

    def _whole(self, method: str, path: str, body: Any) -> Any:
        connection, answer = self._open(method, path, body)
        try:
            return json.loads(answer.read())
        finally:
            connection.close()

    def _events(self, path: str, body: Any) -> Iterator[Any]:
        connection, answer = self._open("POST", path, body)
        try:
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if event.get("error"):
                    raise _refusal(500, data.decode())
                yield event
        finally:
            connection.close()


def _refusal(status: int, text: str) -> RequestError:
    try:
        error = json.loads(text)["error"]
        return RequestError(str(error["message"]), param=error.get("param"), code=error.get("code"))
    except (ValueError, KeyError, TypeError):
        return RequestError(f"the server answered {status}: {text:.300}")

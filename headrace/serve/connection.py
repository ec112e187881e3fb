"""What happens when a client leaves before it has its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from headrace.serve.errors import ClientGone

T = TypeVar("T")


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection. Use it only after the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, but cancel it when the client leaves. Raises ClientGone then."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise ClientGone
    return task.result()

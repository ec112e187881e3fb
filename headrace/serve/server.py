"""Runs the server: the port answers at once, the engine loads meanwhile, SIGTERM lets running answers end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.progress import LoadBar
from headrace.errors import EngineDeadError, HeadraceError
from headrace.observe.stages import Stages
from headrace.serve.app import build_app
from headrace.serve.context import ServerContext
from headrace.serve.settings import ServerConfig

_KEEP_ALIVE_S = 75
_WATCH_S = 0.1
_LAST_WORDS_S = 1.0


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for requests that the server's own end broke off: nobody need know where."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class _Server(uvicorn.Server):
    """uvicorn's server with signals left to ``Serving``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Serving:
    """One server from start to end.

    Args:
        llm: an engine that has begun to load.
        port: a listening socket; closed at the end.
        announce: told in words of what a person watching wants to know.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        port: socket.socket,
        announce: Callable[[str], None],
    ) -> None:
        self._llm = llm
        self._context = ServerContext(llm, config)
        self._port = port
        self._announce = announce
        options = uvicorn.Config(
            build_app(self._context),
            http="auto",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Server(options)
        self._drain_s = config.drain_s
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)

    def run(self) -> None:
        """Serve until told to stop. Raises the error that kept the engine from loading."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.serve())

    async def serve(self) -> None:
        """Serve on the running event loop; see ``run``."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        host, number = self._port.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self._announce(f"listening on http://{shown}:{number}")
        watching = asyncio.create_task(self._watch_engine())
        try:
            await self._server.serve(sockets=[self._port])
        finally:
            watching.cancel()  # before the engine ends, which would look like a failure
            await asyncio.wait([watching])
            await self._llm.shutdown()
        if not watching.cancelled():
            watching.result()

    def _on_signal(self, name: str) -> None:
        """The first signal drains, a second one ends at once."""
        if self._context.is_draining:
            self._announce(f"{name} again: ending now")
            self._end_answers()
            return
        self._context.is_draining = self._server.should_exit = True
        count = self._llm.num_unfinished
        self._announce(f"{name}: no new requests; {count} running" if count else f"{name}: ending")
        asyncio.get_running_loop().call_later(self._drain_s, self._end_answers)

    def _end_answers(self) -> None:
        """Answers that still run fail, and their clients are told; those who do not take it are cut off soon after."""
        self._llm.on_death(EngineDeadError("the server has ended before this answer did"))
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._cut_off)

    def _cut_off(self) -> None:
        self._server.force_exit = True

    async def _watch_engine(self) -> None:
        """Tell how loading goes. A server whose model cannot be loaded ends; one whose engine dies later says so, and
        stays for /health to tell.
        """
        ready = asyncio.create_task(self._llm.wait_ready())
        try:
            with LoadBar() as bar:
                while not (await asyncio.wait({ready}, timeout=_WATCH_S))[0]:
                    bar(self._llm.progress.stage, self._llm.progress.share)
            ready.result()
            stages = Stages(self._llm.metrics.core_stats.get("startup_s", {})).describe()
            self._announce(f"ready: {await self._context.model_name()}" + (f" ({stages})" if stages else ""))
        except HeadraceError:
            self._server.should_exit = True
            raise
        finally:
            ready.cancel()
        death = await self._llm.wait_death()
        if not self._context.is_draining:
            self._announce(f"{death}; every request gets a 503 from now on: start the server again")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop

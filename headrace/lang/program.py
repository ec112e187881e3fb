"""Program: a Python function over a State, run once, over a batch, or streamed."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.lang.backend import Backend
from headrace.lang.state import State
from headrace.lang.trace import shared_beginning

_MAX_THREADS = 64


class Program:
    """Made by ``program``. The function gets a state, to which it adds; what it returns is ``state["return"]``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, state: State, **arguments: Any) -> Any:
        """Run as a part of another program, on its state."""
        return self._function(state, **arguments)

    def run(self, backend: Backend, **arguments: Any) -> State:
        """Run it once. Raises what the program raised, RequestError, EngineDeadError."""
        return self._finish(State(backend), arguments)

    def run_batch(
        self,
        backend: Backend,
        batch: Sequence[Mapping[str, Any]],
        *,
        num_threads: int = _MAX_THREADS,
        cache_prefix: bool = True,
    ) -> list[State]:
        """Run it over many inputs at the same time; states come in their order.

        Args:
            batch: the arguments of each run.
            num_threads: programs that run at once.
            cache_prefix: trace the program, and have the longest beginning that all runs share computed first.

        Raises: the first error of a run, when all are done.
        """
        if not batch:
            return []
        if cache_prefix and len(batch) > 1:
            beginning = shared_beginning(self._function, batch)
            if beginning.text or beginning.messages:
                backend.submit(backend.warm(beginning)).result()
        with ThreadPoolExecutor(min(num_threads, len(batch)), "headrace-program") as threads:
            runs = [threads.submit(self._finish, State(backend), arguments) for arguments in batch]
        return [run.result() for run in runs]

    def stream(self, backend: Backend, **arguments: Any) -> Iterator[tuple[str, str]]:
        """Run it, and yield (variable, piece of its text) as the model writes. Forks are silent.

        Raises as ``run`` does, behind the last piece.
        """
        pieces: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        state = State(backend, on_text=lambda name, text: pieces.put((name, text)))
        failure: list[BaseException] = []

        def work() -> None:
            try:
                self._finish(state, arguments)
            except BaseException as error:
                failure.append(error)
            finally:
                pieces.put(None)

        thread = threading.Thread(target=work, name="headrace-program", daemon=True)
        thread.start()
        while (piece := pieces.get()) is not None:
            yield piece
        thread.join()
        if failure:
            raise failure[0]

    def _finish(self, state: State, arguments: Mapping[str, Any]) -> State:
        value = self._function(state, **arguments)
        state.wait()
        if value is not None:
            state.set("return", value)
        return state


def program(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose first parameter is the state."""
    return Program(function)

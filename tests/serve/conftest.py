from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.launch import LaunchedServer


@pytest.fixture(scope="session")
def server() -> Iterator[LaunchedServer]:
    """A server that answers at once; tests leave it idle and alive."""
    started = LaunchedServer().wait_ready()
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="session")
def parrot() -> Iterator[LaunchedServer]:
    """A server whose answers are what the prompt says behind SAY:, so that tests choose a model's words."""
    started = LaunchedServer({"factory": "tests.serve.odd_cores:parrot", "core": {}}).wait_ready()
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="session")
def masked() -> Iterator[LaunchedServer]:
    """A server with real grammars over a made-up model: random text that the constraint allows."""
    options = {"factory": "tests.serve.odd_cores:masked", "core": {}}
    started = LaunchedServer(options).wait_ready()
    yield started
    assert started.metric("constraint_violations_total") == 0
    assert started.stop() == 0


@pytest.fixture
def launch() -> Iterator[Callable[..., LaunchedServer]]:
    """Starts servers that end with the test."""
    started: list[LaunchedServer] = []

    def go(**options: Any) -> LaunchedServer:
        started.append(LaunchedServer(options))
        return started[-1]

    yield go
    for one in started:
        one.stop()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.lang import Backend, connect
from tests.lang.oracle import LocalOracle
from tests.serve.launch import LaunchedServer


@pytest.fixture(scope="session")
def oracle() -> Iterator[LocalOracle]:
    own = LocalOracle()
    yield own
    own.backend.shutdown()


@pytest.fixture
def model(oracle: LocalOracle) -> Backend:
    return oracle.backend


@pytest.fixture(scope="session")
def lang_server() -> Iterator[LaunchedServer]:
    started = LaunchedServer({"factory": "tests.lang.oracle:oracle", "core": {}}).wait_ready()
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="session")
def remote(lang_server: LaunchedServer) -> Iterator[Backend]:
    with connect(lang_server.base) as backend:
        yield backend

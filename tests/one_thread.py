"""Fixtures for tests that compute with torch: the ``conftest`` of a folder imports the one that it wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def _on_one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors need no more, and several test processes would wait for each other's threads."""
    with _on_one_thread():
        yield


@pytest.fixture(autouse=True)
def one_thread_no_grad() -> Iterator[None]:
    """The same, and nothing is kept for gradients."""
    with _on_one_thread(), torch.no_grad():
        yield

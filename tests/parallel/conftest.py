"""Fixtures of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_no_grad() -> Iterator[None]:
    """Tiny tensors need no more threads, and several test processes would wait for each other's."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(num_threads)

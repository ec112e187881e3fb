"""What is said of a rank that has spoken before it ended."""

from __future__ import annotations

import socket

import pytest

from headrace.errors import ConfigError, DeviceMemoryError, EngineDeadError
from headrace.parallel.rank_status import RankStatus
from headrace.runtime.rank_group import RankGroup
from headrace.runtime.rank_messages import RankFailed
from headrace.runtime.rank_peer import RankPeer


def verdict(kind: str, has_begun: bool) -> Exception:
    group = RankGroup.__new__(RankGroup)
    group._describe = lambda rank: f"rank {rank}"
    with socket.socket() as unused:
        peer = RankPeer(1, unused, RankStatus())
    if has_begun:
        peer.status.begin_step(7)
    return group._last_words(peer, RankFailed(kind, "what it said"))


@pytest.mark.parametrize(
    ("kind", "has_begun", "expected", "text"),
    [
        ("ConfigError", False, ConfigError, "what it said"),
        ("DeviceMemoryError", False, DeviceMemoryError, "rank 1: what it said"),
        (
            "DeviceMemoryError",
            True,
            EngineDeadError,
            "the engine stopped: rank 1 failed with DeviceMemoryError: what it said (its last step was 7, not "
            "completed)",
        ),
        (
            "RuntimeError",
            False,
            EngineDeadError,
            "the engine stopped: rank 1 failed with RuntimeError: what it said (before its first step)",
        ),
    ],
)
def test_the_error_names_the_rank(kind: str, has_begun: bool, expected: type, text: str) -> None:
    error = verdict(kind, has_begun)
    assert type(error) is expected and str(error) == text

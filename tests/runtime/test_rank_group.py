"""What is said of a rank that has spoken before it ended, and of one that says no more."""

from __future__ import annotations

import queue
import socket

import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError, DeviceMemoryError, EngineDeadError, HeadraceError
from headrace.parallel.rank_status import RankStatus
from headrace.runtime.rank_group import RankGroup
from headrace.runtime.rank_messages import RankFailed, RankProgress, RankReady, RankSpec, RankVoice
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


def test_a_rank_that_hangs_while_loading_ends_all() -> None:
    """Two ranks of other hosts: one says that it is ready, the other stops in the middle of its weights."""
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    peers = [RankPeer(rank, end, RankStatus()) for rank, end in enumerate(ours)]
    voices = [RankVoice(end) for end in theirs]
    failures: queue.SimpleQueue[HeadraceError] = queue.SimpleQueue()
    group = RankGroup(
        peers,
        None,
        timeout_s=8.0,
        load_timeout_s=1.5,
        describe=lambda rank: f"rank {rank}",
        on_message=lambda rank, message: None,
        on_failure=failures.put,
        awaits_results=lambda: False,
    )
    group.send(RankSpec(EngineConfig.from_options(), "file:///nowhere", 0))
    for voice in voices:
        voice.send(RankProgress("loading weights", 0.25))
    voices[0].send(RankReady([], 0, 0, 0, 0, ""))
    error = failures.get(timeout=30)
    assert isinstance(error, EngineDeadError) and group.failure is error
    assert "rank 1 has come no further for" in str(error) and "'loading weights', 25% done" in str(error)
    assert "rank_load_timeout_s (1.5)" in str(error) and "before its first step" in str(error)
    group.shutdown()
    for end in theirs:
        end.close()

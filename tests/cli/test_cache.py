from __future__ import annotations

from typing import Any

import pytest

from headrace.cli import cache as cache_command
from headrace.cli.cache import as_text
from tests.cli.conftest import CommandLine

NODE = {"start": 0, "users": 0, "is_pinned": False, "bytes": 3 << 20, "uses_ago": 7, "is_salted": False}


def test_the_tree_is_drawn_with_users_pins_and_sizes() -> None:
    text = as_text(
        {
            "nodes": [
                {
                    **NODE,
                    "depth": 0,
                    "num_tokens": 512,
                    "text": "You are a\nhelpful assistant" + "!" * 80,
                    "users": 3,
                },
                {
                    **NODE,
                    "depth": 1,
                    "num_tokens": 64,
                    "text": "Question",
                    "is_pinned": True,
                    "bytes": 5 << 30,
                },
                {**NODE, "depth": 1, "num_tokens": 16, "text": None, "bytes": 900, "users": 1},
            ],
            "num_nodes_left_out": 4,
            "num_cached_blocks": 37,
            "num_blocks": 100,
            "block_size": 16,
            "num_pins": 1,
        }
    )
    first, top, below, salted, more = text.splitlines()
    assert first == "37 of 100 blocks of 16 tokens are in the tree (37%), 1 pin"
    assert (
        top.startswith("+512 tokens, 3 MiB, 7 uses ago, 3 users  'You are a helpful assistant!")
        and "…" in top
    )
    assert below == "  +64 tokens, 5.0 GiB, 7 uses ago, pinned  'Question'"
    assert salted == "  +16 tokens, 900 B, 7 uses ago, 1 user  (salted)"
    assert more == "and 4 smaller nodes (--max-nodes)"


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_as_it_does_elsewhere(
    headrace: CommandLine, monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    called = []
    monkeypatch.setattr(cache_command, "_call", lambda url, *_: called.append(url) or {"is_empty": True})
    assert headrace("cache", "--reset", "--url", f"http://127.0.0.1:8125{tail}") == 0, headrace.err
    assert called == ["http://127.0.0.1:8125/cache/reset"]


def test_no_server_is_told_in_one_line(headrace: CommandLine) -> None:
    assert headrace("cache", "--url", "http://127.0.0.1:9") == 2
    assert "no Headrace server answers" in headrace.err and "Traceback" not in headrace.err
    assert "urlopen" not in headrace.fails("cache", "--url", "http://127.0.0.1:9")
    assert "as http://host" in headrace.fails("cache", "--url", "localhost")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"is_empty": True, "num_files_left": 0}, "the cache is empty\n"),
        (
            {"is_empty": True, "num_files_left": 2, "files_left_reason": "Read-only file system"},
            "the cache is empty\n2 files of the disk cache could not be removed (Read-only file system): the server's "
            "next start finds them again\n",
        ),
    ],
)
def test_a_reset_tells_of_files_that_stay(
    headrace: CommandLine, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(cache_command, "_call", lambda *args: answer)
    assert headrace("cache", "--reset") == 0 and headrace.out == words


def test_the_help_tells_what_an_age_counts(headrace: CommandLine) -> None:
    assert headrace("cache", "--help") == 0
    assert "Age is counted in uses of the whole cache" in " ".join(headrace.out.split())

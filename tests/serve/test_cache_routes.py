"""The prefix cache over HTTP: looking, explaining, pinning, forgetting; cache_control of requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.launch import LaunchedServer

TEXT = "The headrace carries water from the weir to the wheel of the mill. "


def post(server: LaunchedServer, path: str, **body: Any) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_prompt_is_explained_pinned_and_forgotten(masked: LaunchedServer) -> None:
    post(masked, "/cache/reset")
    assert post(masked, "/cache/explain", prompt=TEXT)["reason"] == "nothing_cached"
    assert masked.complete(TEXT * 3, max_tokens=2).status_code == 200
    report = post(masked, "/cache/explain", prompt=TEXT * 3)
    assert report["reason"] == "whole_prompt"
    assert report["num_cached_tokens"] == report["num_prompt_tokens"] - 1
    changed = post(masked, "/cache/explain", prompt=TEXT * 2 + "But not today, said the miller to the wheel.")
    assert changed["reason"] == "different_token" and changed["position"] > 0
    assert changed["cached_token"]["text"] and changed["prompt_token"]["text"]
    assert changed["cached_token"]["id"] != changed["prompt_token"]["id"]
    assert post(masked, "/cache/explain", prompt=TEXT * 3, cache_salt="tenant")["reason"] == "salt"
    pinned = post(masked, "/cache/pin", prompt=TEXT * 3, ttl="1h")
    assert pinned["num_pinned_tokens"] > 0
    tree = masked.http.get("/cache", params={"max_nodes": 5}).json()
    assert tree["num_pins"] == 1 and tree["num_cached_blocks"] > 0
    assert tree["nodes"][0]["text"].startswith("The headrace")
    assert post(masked, "/cache/unpin", prompt=TEXT * 3) == {"was_pinned": True}
    assert post(masked, "/cache/reset") == {"is_empty": True}
    assert masked.http.get("/cache").json()["nodes"] == []


def test_salted_text_is_not_shown(masked: LaunchedServer) -> None:
    post(masked, "/cache/reset")
    assert masked.complete(TEXT * 2, max_tokens=2, cache_salt="tenant").status_code == 200
    nodes = masked.http.get("/cache").json()["nodes"]
    assert nodes and all(node["text"] is None and node["is_salted"] for node in nodes)


def test_cache_control_pins_the_prompt(masked: LaunchedServer) -> None:
    post(masked, "/cache/reset")
    control = {"type": "ephemeral", "ttl": "5m"}
    assert masked.complete(TEXT * 2, max_tokens=2, cache_control=control).status_code == 200
    assert masked.http.get("/cache").json()["num_pins"] == 1
    part = {"type": "text", "text": TEXT * 2, "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part]}
    assert masked.http.post(
        "/v1/messages", json={"model": "m", "messages": [message], "max_tokens": 2}
    ).status_code in (200, 404)
    post(masked, "/cache/reset")
    assert masked.http.get("/cache").json()["num_pins"] == 0


@pytest.mark.parametrize("control", [{"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, "yes", 5])
def test_a_wrong_cache_control_is_refused(server: LaunchedServer, control: Any) -> None:
    answer = server.complete("Hi", cache_control=control)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_control"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/cache/explain", {}, "prompt"),
        ("/cache/explain", {"prompt": "a", "messages": []}, "prompt"),
        ("/cache/explain", {"prompt": ["a", "b"]}, "prompt"),
        ("/cache/pin", {"prompt": "a", "ttl": "1y"}, "ttl"),
        ("/cache/pin", {"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ("/cache/pin", {"prompt": "a", "ttl_s": 1e9}, "ttl_s"),
    ],
)
def test_mistakes_are_told(masked: LaunchedServer, path: str, body: dict[str, Any], param: str) -> None:
    answer = masked.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_wrong_sizes_of_the_tree_are_refused(server: LaunchedServer) -> None:
    for text in ("0", "-1", "x", "99999999999"):
        assert server.http.get("/cache", params={"max_nodes": text}).status_code == 400


def test_hits_of_each_tier_are_counted(masked: LaunchedServer) -> None:
    for name in ("prefix_cache_hits_total", "host_cache_hits_total", "disk_cache_hits_total"):
        assert masked.metric(name) >= 0

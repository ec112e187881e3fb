"""POST /weights/update: what operators and trainers see of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.tiny_models import make_model
from tests.serve.launch import LaunchedServer

PROMPT = [1, *range(10, 50)]
Launch = Callable[..., LaunchedServer]


def complete(server: LaunchedServer, **fields: Any) -> tuple[list[int], int]:
    """(tokens, prompt tokens that were cached)."""
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = server.complete(PROMPT, **options)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["token_ids"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_weights_are_replaced_and_wrong_ones_refused(launch: Launch, tmp_path: Path) -> None:
    make_model("llama", tmp_path / "a", seed=1)
    make_model("llama", tmp_path / "b", seed=2)
    make_model("llama", tmp_path / "wide", seed=3, intermediate_size=128)
    engine = {
        "model": str(tmp_path / "a"),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "num_kv_blocks": 64,
        "threads": 1,
    }
    factory = "headrace.engine.assemble:build_engine_core"
    server = launch(engine=engine, factory=factory, core={}).wait_ready()
    of_a, _ = complete(server)
    assert complete(server) == (of_a, 40)
    wide = server.http.post("/weights/update", json={"model": str(tmp_path / "wide")})
    assert wide.status_code == 400 and wide.json()["error"]["param"] == "model"
    assert "intermediate_size is 128, and must be 96" in wide.json()["error"]["message"]
    assert server.http.post("/weights/update", json={"path": "x"}).status_code == 400
    assert server.http.get("/weights/update").status_code == 405
    with server.open_raw("/v1/completions", {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True}):
        server.wait_metric("num_requests_running", 1)
        busy = server.http.post("/weights/update", json={"model": str(tmp_path / "b")})
        assert busy.status_code == 409 and busy.json()["error"]["code"] == "requests_unfinished"
    server.wait_metric("num_requests_running", 0)
    assert complete(server) == (of_a, 40)
    done = server.http.post("/weights/update", json={"model": str(tmp_path / "b")})
    assert done.status_code == 200 and done.json() == {"is_updated": True}
    of_b, num_cached = complete(server)
    assert of_b != of_a and num_cached == 0
    assert server.metric("weight_updates_total") == 1
    assert server.http.post("/weights/update").status_code == 200  # the same files again
    assert complete(server) == (of_b, 0)


def test_it_needs_the_key(launch: Launch) -> None:
    server = launch(server={"api_key": "sesame"}).wait_ready()
    assert server.http.post("/weights/update", json={}).status_code == 401
    headers = {"authorization": "Bearer sesame"}
    assert server.http.post("/weights/update", json={}, headers=headers).status_code == 200

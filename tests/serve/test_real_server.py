"""The command itself with the packaged model, and the examples of the documentation against it."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "serving.md",
    ROOT / "docs" / "tools.md",
    ROOT / "docs" / "structured.md",
]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from headrace.cli.main import main; main()"]
    arguments = ["serve", "smollm2", "--port", str(port), "--num-kv-blocks", "200"]
    server = subprocess.Popen([*command, *arguments], cwd=ROOT, stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert server.poll() is None, server.stderr and server.stderr.read()
        try:
            if httpx.get(url + "/health", trust_env=False).status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    yield url
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0


def blocks(language: str) -> list[str]:
    return [b for page in PAGES for b in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)]


def curl_commands() -> list[str]:
    lines = "\n".join(blocks("console")).replace("\\\n", " ").splitlines()
    return [line[2:] for line in lines if line.startswith("$ curl")]


def openai_examples() -> list[str]:
    return [source for source in blocks("python") if "OpenAI(" in source or "AsyncLLM" in source]


@pytest.mark.parametrize("command", curl_commands())
def test_curl_examples(base: str, command: str) -> None:
    words = shlex.split(command)
    url = next(word for word in words if word.startswith("http"))
    data = words[words.index("-d") + 1]
    headers = {"content-type": "application/json"}
    assert headers["content-type"] in words[words.index("-H") + 1]
    answer = httpx.post(base + re.sub(r"^http://[^/]+", "", url), content=data, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    if '"stream": true' in data:
        assert answer.text.endswith("data: [DONE]\n\n") and '"usage":{' in answer.text
    else:
        assert answer.json()["choices"]


@pytest.mark.parametrize("source", openai_examples(), ids=lambda source: source.split("\n")[0])
def test_python_examples(base: str, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(
        compile(source.replace("http://127.0.0.1:8000", base), "serving.md", "exec"), {"__name__": "__main__"}
    )
    assert capsys.readouterr().out.strip()


def complete(base: str, prompt: object, **fields: object) -> dict[str, object]:
    body = {"prompt": prompt, "temperature": 0, **fields}
    answer = httpx.post(base + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_answer_and_its_scores(base: str) -> None:
    got = complete(base, "The capital of France is", max_tokens=3, logprobs=2, echo=True)
    (choice,) = got["choices"]  # type: ignore[misc]
    assert choice["text"].startswith("The capital of France is Paris")
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"] and len(lists["tokens"]) == 8
    assert lists["token_logprobs"][0] is None and all(value <= 0 for value in lists["token_logprobs"][1:])


def test_repeated_prompt_is_cached(base: str) -> None:
    head = "Every page was stamped twice and filed under its own year. " * 10
    first, second = (complete(base, head, max_tokens=1)["usage"] for _ in range(2))
    assert first["prompt_tokens"] == second["prompt_tokens"]  # type: ignore[index]
    cached = second["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]
    assert cached > second["prompt_tokens"] / 2  # type: ignore[index]
    events = httpx.post(
        base + "/v1/completions",
        json={"prompt": head, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        timeout=120,
    ).text
    assert f'"cached_tokens":{cached}' in events


def test_nothing_is_held_when_all_have_left(base: str) -> None:
    port = int(base.rsplit(":", 1)[1])
    body = b'{"prompt": "Tale", "max_tokens": 1500, "stream": true, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for stream in streams:
        stream.sendall(head + body)
    time.sleep(0.5)
    for stream in streams:
        stream.close()
    names = ("num_requests_running", "num_requests_waiting", "num_kv_blocks_held")
    end = time.monotonic() + 20
    while time.monotonic() < end:
        text = httpx.get(base + "/metrics").text
        held = [float(re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M)[1]) for name in names]  # type: ignore[index]
        if held == [0, 0, 0]:
            return
        time.sleep(0.1)
    raise AssertionError(f"{names}: {held}")

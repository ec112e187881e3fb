"""``headrace cache``: look into the prefix cache of a running server."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from headrace.cli.refusal import BODY_BYTES, refusal
from headrace.errors import ConfigError
from headrace.server_address import server_address

_TIMEOUT_S = 30.0
_SHOWN_CHARS = 60


def cache(
    url: Annotated[
        str, typer.Option("--url", "--base-url", help="where the server is")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="the server's key, if it has one")] = None,
    max_nodes: Annotated[int, typer.Option(min=1, max=10_000, help="nodes to draw at most")] = 200,
    reset: Annotated[bool, typer.Option("--reset", help="forget everything instead")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a drawing")] = False,
) -> None:
    """Draw what a server has cached: tokens, users, bytes and age of every shared beginning.

    Age is counted in uses of the whole cache since this beginning's last one, not in seconds: a use is a request that
    looks its prompt up, adds blocks or ends. What has the highest age leaves first.
    """
    address = server_address(url).geturl()
    if reset:
        answer = _call(f"{address}/cache/reset", api_key, b"{}")
        sys.stdout.write(
            "the cache is empty\n" if answer["is_empty"] else "what running requests use is kept\n"
        )
        if answer.get("num_files_left"):
            sys.stdout.write(
                f"{_count(answer['num_files_left'], 'file')} of the disk cache could not be removed "
                f"({answer['files_left_reason']}): the server's next start finds them again\n"
            )
        return
    tree = _call(f"{address}/cache?max_nodes={max_nodes}", api_key)
    sys.stdout.write(json.dumps(tree, indent=1) + "\n" if as_json else as_text(tree))


def as_text(tree: dict[str, Any]) -> str:
    """One line a node, below the one it continues."""
    share = tree["num_cached_blocks"] / max(tree["num_blocks"], 1)
    lines = [
        f"{tree['num_cached_blocks']} of {tree['num_blocks']} blocks of {tree['block_size']} tokens are in the tree "
        f"({share:.0%}), {_count(tree['num_pins'], 'pin')}"
    ]
    for node in tree["nodes"]:
        marks = [_count(node["users"], "user")] if node["users"] else []
        marks += ["pinned"] if node["is_pinned"] else []
        text = "(salted)" if node["text"] is None else _one_line(node["text"])
        lines.append(
            f"{'  ' * node['depth']}+{node['num_tokens']} tokens, {_size(node['bytes'])}, "
            f"{node['uses_ago']} uses ago{''.join(', ' + mark for mark in marks)}  {text}"
        )
    if tree["num_nodes_left_out"]:
        lines.append(f"and {tree['num_nodes_left_out']} smaller nodes (--max-nodes)")
    return "\n".join(lines) + "\n"


def _call(url: str, api_key: str | None, body: bytes | None = None) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise ConfigError(refusal(url, error.code, error.read(BODY_BYTES))) from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(
            f"no Headrace server answers at {url}: {reason}; give its address with --url, as http://host:8000"
        ) from error


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= _SHOWN_CHARS else flat[: _SHOWN_CHARS - 1] + "…")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

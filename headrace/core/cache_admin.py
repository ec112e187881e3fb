"""What users and operators ask of the prefix cache: look, explain, pin, forget. Answers are plain values."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.cache_tiers import TieredCache
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.match_report import explain_match
from headrace.core.radix_tree import TOKEN_BYTES, RadixNode
from headrace.errors import RequestError

MAX_TTL_S = 7 * 24 * 3600.0
SHOWN_TOKENS = 24
"""Of each node, so that its text can be told."""


class CacheAdmin:
    """Actions by name, as they come over HTTP."""

    def __init__(self, kv: KVCacheManager, tiers: TieredCache | None = None) -> None:
        self._kv = kv
        self._tiers = tiers

    def call(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do one of ``tree``, ``explain``, ``pin``, ``unpin``, ``files_left``.

        Raises: RequestError for another action, or wrong arguments.
        """
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "tree": self._tree,
            "explain": self._explain,
            "pin": self._pin,
            "unpin": self._unpin,
            "files_left": self._files_left,
        }
        if action not in actions:
            raise RequestError(
                f"unknown cache action {action!r}; choose one of: {', '.join(actions)}", param="action"
            )
        return actions[action](**arguments)

    def _explain(self, token_ids: list[int], namespace: str = "") -> dict[str, Any]:
        tokens = _bytes(token_ids)
        report = explain_match(self._kv, namespace, tokens)
        if self._tiers is not None and self._kv.is_prefix_caching_enabled:
            beginning = tokens[:-TOKEN_BYTES]  # the last token is always computed
            report.num_tier_tokens = self._tiers.held_tokens(namespace, beginning, report.num_cached_tokens)
        answer: dict[str, Any] = msgspec.to_builtins(report)
        return answer

    def _pin(self, token_ids: list[int], ttl_s: float, namespace: str = "") -> dict[str, Any]:
        if not 0 < ttl_s <= MAX_TTL_S:
            raise RequestError(f"ttl_s must be in (0, {MAX_TTL_S:.0f}]; got {ttl_s}", param="ttl_s")
        if not self._kv.is_prefix_caching_enabled:
            raise RequestError("nothing can be pinned: the engine runs without enable_prefix_caching")
        pin = self._kv.pins.pin(namespace, _bytes(token_ids), ttl_s)
        return {
            "num_pinned_tokens": pin.num_bytes // TOKEN_BYTES,
            "num_pinnable_tokens": len(pin.tokens) // TOKEN_BYTES,
            "num_tokens": len(token_ids),
        }

    def _unpin(self, token_ids: list[int], namespace: str = "") -> dict[str, Any]:
        return {"was_pinned": self._kv.pins.unpin(namespace, _bytes(token_ids))}

    def _files_left(self) -> dict[str, Any]:
        """What the last reset could not remove: asked again until it has ended, so that no step waits for a disk."""
        left = (0, "") if self._tiers is None else self._tiers.files_left()
        if left is None:
            return {"is_done": False}
        why = {"files_left_reason": left[1]} if left[0] else {}
        return {"is_done": True, "num_files_left": left[0], **why}

    def _tree(self, max_nodes: int = 200) -> dict[str, Any]:
        """Nodes in depth-first order, large subtrees first; those beyond ``max_nodes`` are counted only.

        Users are running requests; a pin marks every node of its path.
        """
        kv, tree = self._kv, self._kv.cache.tree
        block_bytes = sum(spec.bytes_per_block for spec in kv.specs)
        pins = kv.pins.locks()
        sizes = _subtree_blocks(list(tree.nodes()))
        nodes: list[dict[str, Any]] = []
        stack = [(root, 0, 0) for root in sorted(tree.roots.values(), key=lambda root: sizes.get(root, 0))]
        num_left = 0
        while stack:
            node, depth, start = stack.pop()
            end = start + node.num_blocks * kv.block_size
            if node.parent is not None and len(nodes) >= max_nodes:
                num_left += 1
            elif node.parent is not None:
                nodes.append(
                    {
                        "depth": depth - 1,
                        "start": start,
                        "num_tokens": end - start,
                        "token_ids": memoryview(bytes(node.tokens[: SHOWN_TOKENS * TOKEN_BYTES]))
                        .cast("I")
                        .tolist(),
                        "users": node.num_locks - pins[node],
                        "is_pinned": pins[node] > 0,
                        "bytes": node.num_blocks * block_bytes,
                        "uses_ago": tree.clock - node.access_time,
                        "is_salted": bool(_namespace_of(node)),
                    }
                )
            children = sorted(node.children.values(), key=lambda child: sizes[child])
            stack += [(child, depth + 1, end) for child in children]
        return {
            "nodes": nodes,
            "num_nodes_left_out": num_left,
            "num_cached_blocks": sum(node.num_blocks for node in tree.nodes()),
            "num_blocks": kv.num_blocks,
            "block_size": kv.block_size,
            "num_pins": len(kv.pins),
        }


def _bytes(token_ids: list[int]) -> bytes:
    try:
        return array("I", token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise RequestError("token ids must be whole numbers from 0 up", param="prompt") from error


def _subtree_blocks(nodes: list[RadixNode]) -> dict[RadixNode, int]:
    """Blocks of each node and all below it. ``nodes`` has parents before children."""
    sizes = {node: node.num_blocks for node in nodes}
    for node in reversed(nodes):
        if node.parent is not None:
            sizes[node.parent] = sizes.get(node.parent, 0) + sizes[node]
    return sizes


def _namespace_of(node: RadixNode) -> str:
    while node.parent is not None:
        node = node.parent
    return node.namespace

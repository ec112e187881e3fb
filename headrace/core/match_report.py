"""Why a prompt's cached beginning is as long as it is: where the match stopped, and on what."""

from __future__ import annotations

import msgspec

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.radix_tree import TOKEN_BYTES, RadixNode, common_tokens


class MatchReport(msgspec.Struct, omit_defaults=True):
    """What the cache holds of a prompt, and why not more.

    num_cached_tokens: tokens that need not be computed.
    reason: ``whole_prompt`` (all but the token that is always computed), ``different_token``, ``end_of_cache`` (what is
        cached ends here), ``evicted`` (more was cached and had to leave), ``block_boundary`` (the rest of the prompt is
        less than a block, or too little of one to copy), ``salt`` (nothing is cached under this salt), ``window``
        (a sliding window's blocks are gone), ``nothing_cached``, ``disabled``.
    num_tier_tokens: further tokens that host memory or disk holds; a request loads them where that is quicker.
    position: of the first differing token; ``cached_token`` and ``prompt_token`` are the two.
    """

    num_cached_tokens: int
    reason: str
    position: int | None = None
    cached_token: int | None = None
    prompt_token: int | None = None
    num_tier_tokens: int = 0


def explain_match(kv: KVCacheManager, namespace: str, tokens: bytes) -> MatchReport:
    """Look a prompt (uint32 token bytes) up. It counts as used; other namespaces are not looked at."""
    if not kv.is_prefix_caching_enabled:
        return MatchReport(0, "disabled")
    limit = len(tokens) // TOKEN_BYTES - 1
    match = kv.cache.match(namespace, tokens[: limit * TOKEN_BYTES], kv.min_copy_tokens)
    found = match.num_tokens
    if found >= limit:
        return MatchReport(found, "whole_prompt")
    root = kv.cache.tree.roots.get(namespace)
    if root is None:
        return MatchReport(found, "salt" if namespace else "nothing_cached")
    size = kv.cache.tree.block_bytes
    num_whole = kv.cache.tree.num_matching(namespace, tokens)
    if found // kv.block_size < num_whole // kv.block_size:
        return MatchReport(found, "window")
    rest = tokens[num_whole * TOKEN_BYTES : num_whole * TOKEN_BYTES + size]
    cached = _next_block(kv, root, tokens, num_whole * TOKEN_BYTES)
    common = common_tokens(cached, rest) if cached is not None else 0
    if kv.cache.evictor.was_evicted(namespace, tokens[: num_whole * TOKEN_BYTES + size]):
        return MatchReport(found, "evicted")
    if cached is None:
        return MatchReport(found, "end_of_cache" if num_whole else "nothing_cached")
    if common * TOKEN_BYTES < len(rest):
        ours, theirs = (memoryview(data).cast("I")[common] for data in (rest, cached))
        return MatchReport(found, "different_token", num_whole + common, theirs, ours)
    return MatchReport(found, "block_boundary")


def _next_block(kv: KVCacheManager, root: RadixNode, tokens: bytes, start: int) -> bytes | None:
    """The cached block after ``tokens[:start]`` (bytes) that begins most like what follows there."""
    tree, size = kv.cache.tree, kv.cache.tree.block_bytes
    node, end = tree.descend(root, tokens, start)
    assert end == start, "the tree was just asked"
    child, _ = tree.closest_child(node, tokens[start : start + size])
    if child is None and node.children:
        child = next(iter(node.children.values()))
    return None if child is None else bytes(child.tokens[:size])

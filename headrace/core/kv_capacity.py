"""How many tokens fit into KV blocks of several groups, and which groups can be served at all."""

from __future__ import annotations

import sys

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.errors import ConfigError


def verify_specs(specs: list[KVCacheSpec], num_blocks: int, block_size: int) -> None:
    """Refuse what the KV cache manager cannot hold. Raises: ConfigError naming the value, the limit and the fix."""
    if not specs:
        raise ConfigError("a model needs at least one KV group; got none")
    for spec in specs:
        if spec.kind == "state":
            raise ConfigError(
                f"layers {spec.layer_ids} keep one state a request (KV group kind 'state'), which is not supported; "
                "use a model whose layers are all attention"
            )
        if (spec.window is not None) != (spec.kind == "sliding") or (
            spec.window is not None and spec.window < 1
        ):
            raise ConfigError(
                f"a KV group of kind {spec.kind!r} has window {spec.window}; a sliding group needs a window of at "
                "least 1 token and no other group has one"
            )
    sizes = sorted({spec.bytes_per_block for spec in specs})
    if len(sizes) > 1:
        raise ConfigError(f"KV groups share one pool, so their blocks must have equal bytes; got {sizes}")
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1 token; got {block_size}")
    if num_blocks < len(specs):
        raise ConfigError(
            f"{num_blocks} KV blocks cannot serve {len(specs)} KV groups; raise num_kv_blocks or kv_cache_bytes"
        )


def longest_request(specs: list[KVCacheSpec], num_blocks: int, block_size: int, max_step_tokens: int) -> int:
    """Tokens of the longest request that fits when it is alone; ``sys.maxsize`` if its memory does not grow.

    max_step_tokens: tokens computed but not yet committed at a time, which a sliding group holds beside its window.
    """
    limits = [
        _most_blocks_touched(spec.window - 1 + max_step_tokens, block_size)
        for spec in specs
        if spec.window is not None
    ]
    num_full = len(specs) - len(limits)
    longest = 0
    for extent in [*sorted(set(limits)), sys.maxsize]:  # up to each extent, the need rises linearly
        saturated = sum(limit for limit in limits if limit < extent)
        num_rising = num_full + sum(limit >= extent for limit in limits)
        if not num_rising:
            return sys.maxsize if saturated <= num_blocks else longest * block_size
        longest = max(longest, min(extent, max(0, num_blocks - saturated) // num_rising))
    return longest * block_size


def _most_blocks_touched(num_tokens: int, block_size: int) -> int:
    """Blocks that a run of tokens touches if it begins at the worst place of a block."""
    return -(-(num_tokens - 1) // block_size) + 1

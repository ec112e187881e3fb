"""Counters of the KV memory."""

from __future__ import annotations

import msgspec


class KVCacheStats(msgspec.Struct):
    """Counts since the start, and how full the blocks are that requests hold now.

    num_query_tokens, num_hit_tokens: known tokens of admitted requests, and those of them found in the cache.
    num_evicted_blocks: blocks that left the prefix cache for want of room.
    num_request_slots: slots of blocks that requests keep from others, shared ones counted once.
    num_token_slots: those of them with a token in place.
    num_fenced_slots: slots of blocks that only steps in flight keep.
    """

    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_request_slots: int = 0
    num_token_slots: int = 0
    num_fenced_slots: int = 0

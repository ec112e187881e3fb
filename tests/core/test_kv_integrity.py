"""The proof itself: whatever is damaged, it says so and names what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_request import held_blocks
from headrace.core.radix_tree import RadixNode
from headrace.core.request import Request
from tests.core.kv_simulation import full, make_request, sliding


def busy() -> tuple[KVCacheManager, Request]:
    """A manager with a running request, a cached branch, idle sliding blocks and a pending copy."""
    kv = KVCacheManager([full(), sliding(6)], 60, 4, min_copy_tokens=2)
    first = make_request(list(range(20)), "first")
    assert kv.admit(first, None, 20, 1)
    first.num_computed_tokens = first.num_committed_tokens = 20
    first.last_step_id = 1
    kv.commit(first)
    kv.advance(1)
    kv.free(first)
    request = make_request([*range(14), 77, 78, 79], "running")
    assert kv.admit(request, kv.match(request, 16), 17, 2)
    request.num_computed_tokens = 17
    kv.check_integrity([request])
    return kv, request


def leaf(kv: KVCacheManager) -> RadixNode:
    return next(node for node in kv.cache.tree.nodes() if not node.children)


def add_reference(kv: KVCacheManager, request: Request) -> None:
    kv.pool.ref_count[request.block_table[0][0]] += 1


def forget_block(kv: KVCacheManager, request: Request) -> None:
    request.block_table[0][3] = -1


def swap_block(kv: KVCacheManager, request: Request) -> None:
    request.block_table[1][4] = kv.pool.allocate(1)[0]


def shift_table(kv: KVCacheManager, request: Request) -> None:
    request.block_table[0].append(kv.pool.allocate(1)[0])


def lose_lock(kv: KVCacheManager, request: Request) -> None:
    node = held_blocks(request).node
    assert node is not None
    node.num_locks += 1


def wrong_tokens(kv: KVCacheManager, request: Request) -> None:
    request.token_ids[2] = 99


def wrong_namespace(kv: KVCacheManager, request: Request) -> None:
    request.namespace = "tenant"


def wrong_count(kv: KVCacheManager, request: Request) -> None:
    kv.cache.evictor.num_unlocked += 1


def lose_idle(kv: KVCacheManager, request: Request) -> None:
    kv.cache.evictor.idle.pop(next(iter(kv.cache.evictor.idle)))


def lose_pin(kv: KVCacheManager, request: Request) -> None:
    kv.cache.evictor.pinned.clear()


def cut_edge(kv: KVCacheManager, request: Request) -> None:
    del leaf(kv).tokens[-4:]


def lose_key(kv: KVCacheManager, request: Request) -> None:
    parent = leaf(kv).parent
    assert parent is not None
    parent.keys.pop()


def unqueue(kv: KVCacheManager, request: Request) -> None:
    leaf(kv).is_queued = False


def lose_home(kv: KVCacheManager, request: Request) -> None:
    kv.cache.tree.homes.popitem()


def overcommit(kv: KVCacheManager, request: Request) -> None:
    request.num_committed_tokens = request.num_computed_tokens + 1


def age_parent(kv: KVCacheManager, request: Request) -> None:
    node = leaf(kv)
    upper = kv.cache.tree.split(node, 1)
    kv.check_integrity([request])
    upper.access_time = node.access_time - 1


DAMAGES: list[tuple[Callable[[KVCacheManager, Request], None], str]] = [
    (add_reference, "references"),
    (forget_block, "group 0 keeps from"),
    (swap_block, "references"),
    (shift_table, "capacity"),
    (lose_lock, "locks"),
    (wrong_tokens, "holds other tokens"),
    (wrong_namespace, "namespace"),
    (wrong_count, "unlocked"),
    (lose_idle, "unlocked|idle"),
    (lose_pin, "references"),
    (cut_edge, "length"),
    (lose_key, "keys"),
    (unqueue, "not queued"),
    (lose_home, "looked up wrongly"),
    (overcommit, "counts"),
    (age_parent, "used after its parent"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damage_is_seen_and_named(damage: Callable[[KVCacheManager, Request], None], message: str) -> None:
    kv, request = busy()
    damage(kv, request)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity([request])


def test_a_request_that_only_one_side_knows_is_seen() -> None:
    kv, request = busy()
    with pytest.raises(AssertionError, match="running"):
        kv.check_integrity([])
    stranger = make_request([1, 2], "stranger")
    stranger.block_table = [[0], [1]]
    with pytest.raises(AssertionError, match="stranger"):
        kv.check_integrity([request, stranger])

"""Proof that no block leaks: every count of the KV memory recomputed from its owners."""

from __future__ import annotations

from collections import Counter

from headrace.core.kv_request import held_blocks
from headrace.core.radix_cache import RadixCache
from headrace.core.radix_tree import RadixNode
from headrace.core.request import Request


def check_ledger(
    cache: RadixCache, admitted: list[Request], requests: list[Request], pinned: list[RadixNode]
) -> None:
    """Compare all reference counts, locks and totals with what requests, tree, copies and transfers really hold.

    pinned: ends of paths that pins lock.
    admitted: requests that the manager knows; requests: those that their owner knows (idle ones may be among them).
    Raises: AssertionError naming the block, the node or the request.
    """
    holding = [request for request in requests if request.block_table]
    strange = {request.request_id for request in set(holding) ^ set(admitted)}
    assert not strange, f"requests held by only one of manager and scheduler: {sorted(strange)}"
    owners: Counter[int] = Counter(cache.evictor.pinned)
    owners.update(cache.evictor.in_transfer)
    owners.update(cache.evictor.loading)
    for request in admitted:
        _check_request(cache, request)
        for table in request.block_table:
            owners.update(block for block in table if block >= 0)
    check_tree(cache)
    tree_blocks = [block for node in cache.tree.nodes() for ids in node.blocks for block in ids if block >= 0]
    assert len(tree_blocks) == len(set(tree_blocks)), f"blocks twice in the tree: {_repeated(tree_blocks)}"
    owners.update(tree_blocks)
    for block, count in enumerate(cache.pool.ref_count):
        assert count == owners[block], f"block {block}: {count} references, {owners[block]} owners"
    cache.pool.check_integrity()
    pool = cache.pool
    assert pool.num_free + pool.num_fenced + len(owners) == pool.num_blocks, f"{len(owners)} blocks are owned"
    _check_locks(cache, admitted, pinned)
    _check_idle(cache)


def check_tree(cache: RadixCache) -> None:
    """The tree's shape: edges hold whole blocks in every group, children are found by their first block."""
    tree = cache.tree
    unlocked = 0
    tracked: dict[int, tuple[RadixNode, int]] = {}
    for node in tree.nodes():
        name = f"node of blocks {node.blocks}"
        assert node.parent is not None
        assert node.num_blocks > 0 and len(node.tokens) == node.num_blocks * tree.block_bytes, (
            f"{name}: length"
        )
        assert node.parent.children.get(bytes(node.tokens[: tree.block_bytes])) is node, (
            f"{name}: not found by its key"
        )
        assert node.keys == sorted(node.children), f"{name}: keys"
        for group, ids in enumerate(node.blocks):
            assert len(ids) == node.num_blocks, f"{name}: group {group}"
            assert group in cache.windows or -1 not in ids, f"{name}: a full group's block is gone"
            if group in cache.windows:
                tracked.update((block, (node, group)) for block in ids if block >= 0)
        if node.num_locks:
            continue
        unlocked += node.num_blocks
        assert (
            node.parent.num_locks or node.parent.parent is None or node.parent.access_time >= node.access_time
        ), f"{name}: used after its parent"
        if not node.children:
            assert node.is_queued or not cache.num_full_groups, f"{name}: an unlocked leaf is not queued"
            assert any(ids[-1] >= 0 for ids in node.blocks), f"{name}: ends without a block"
    assert tracked == tree.homes, (
        f"blocks looked up wrongly: {set(tracked.items()) ^ set(tree.homes.items())}"
    )
    assert cache.num_evictable_blocks == unlocked * cache.num_full_groups + len(cache.evictor.idle), (
        f"{unlocked} unlocked"
    )


def _check_request(cache: RadixCache, request: Request) -> None:
    """Its table covers its tokens, and the path it locks holds exactly its inserted blocks' tokens."""
    name, held, size = f"request {request.request_id}", held_blocks(request), cache.block_size
    capacities = {len(table) * size for table in request.block_table}
    assert capacities == {request.capacity_tokens}, (
        f"{name}: capacity {request.capacity_tokens}, {capacities}"
    )
    assert request.num_committed_tokens <= request.num_computed_tokens <= request.capacity_tokens, (
        f"{name}: counts"
    )
    for group, table in enumerate(request.block_table):
        kept = held.first_kept[cache.windows[group]] if group in cache.windows else 0
        assert table[:kept] == [-1] * kept and -1 not in table[kept:], (
            f"{name}: group {group} keeps from {kept}"
        )
    if held.node is None:
        return
    namespace, tokens = cache.tree.path_tokens(held.node)
    expected = request.token_ids[: held.num_inserted * size]
    assert namespace == request.namespace, f"{name}: locks a path of namespace {namespace!r}"
    assert list(memoryview(tokens).cast("I")) == expected, f"{name}: the path it locks holds other tokens"


def _check_locks(cache: RadixCache, admitted: list[Request], pinned: list[RadixNode]) -> None:
    locks: Counter[int] = Counter()
    ends = [held_blocks(request).node for request in admitted]
    for node in [*ends, *pinned]:
        while node is not None:
            locks[id(node)] += 1
            node = node.parent
    for node in [*cache.tree.roots.values(), *cache.tree.nodes()]:
        assert node.num_locks == locks.pop(id(node), 0), (
            f"node of blocks {node.blocks}: {node.num_locks} locks"
        )
    assert not locks, "a request locks a node that has left the tree"
    for root in cache.tree.roots.values():
        assert root.children or root.num_locks, f"bare root of namespace {root.namespace!r}"


def _check_idle(cache: RadixCache) -> None:
    expected = {block for block in cache.tree.homes if cache.pool.ref_count[block] == 1}
    idle = cache.evictor.idle
    assert set(idle) == expected, f"idle blocks {sorted(set(idle) ^ expected)} miscounted"
    assert list(idle.values()) == sorted(idle.values()), "idle blocks are not in order of use"


def _repeated(ids: list[int]) -> list[int]:
    return [block for block, count in Counter(ids).items() if count > 1]

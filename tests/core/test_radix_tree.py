"""The tree's shape: edges of whole blocks, splits where paths part, nearest children."""

from __future__ import annotations

import random
from array import array

import pytest

from headrace.core.radix_tree import RadixNode, RadixTree, common_tokens

BLOCK = 4


def pack(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def run(first: int, num_blocks: int) -> bytes:
    """Tokens first, first+1, ... of so many blocks."""
    return pack(*range(first, first + num_blocks * BLOCK))


def put(tree: RadixTree, tokens: bytes, first_block: int) -> RadixNode:
    """Add a path below the root, unlocked; its blocks are numbered from ``first_block``."""
    node, matched = tree.descend(tree.root(""), tokens, len(tokens))
    if matched == len(tokens):
        return node
    num_new = (len(tokens) - matched) // tree.block_bytes
    node = tree.append(
        node, tokens[matched:], [list(range(first_block, first_block + num_new))] * tree.num_groups
    )
    node.num_locks = 0
    return node


def test_a_path_is_one_edge_until_another_parts_from_it() -> None:
    tree = RadixTree(BLOCK, 1)
    put(tree, run(0, 5), 100)
    (node,) = tree.nodes()
    assert node.blocks == [[100, 101, 102, 103, 104]] and node.num_blocks == 5
    put(tree, run(0, 2) + run(50, 3), 200)
    upper = tree.root("").children[run(0, 1)]
    assert upper.blocks == [[100, 101]] and len(upper.children) == 2
    assert upper.children[run(8, 1)] is node and node.blocks == [[102, 103, 104]]
    assert upper.children[run(50, 1)].blocks == [[200, 201, 202]]
    assert upper.keys == sorted(upper.children)


def test_descend_ends_at_whole_blocks_and_splits_there() -> None:
    tree = RadixTree(BLOCK, 1)
    leaf = put(tree, run(0, 6), 100)
    query = run(0, 3) + pack(12, 13, 99, 99)
    node, matched = tree.descend(tree.root(""), query, len(query))
    assert matched == 3 * tree.block_bytes and node.blocks == [[100, 101, 102]]
    assert leaf.parent is node and leaf.blocks == [[103, 104, 105]]
    assert tree.descend(tree.root(""), run(0, 6), 2 * tree.block_bytes)[0].blocks == [[100, 101]]
    assert tree.descend(tree.root(""), run(7, 2), 2 * tree.block_bytes) == (tree.root(""), 0)
    assert tree.descend(tree.root(""), run(0, 6), 6 * tree.block_bytes) == (leaf, 6 * tree.block_bytes)


def test_a_split_keeps_locks_times_and_the_end_of_the_node() -> None:
    tree = RadixTree(BLOCK, 2, tracked_groups=(1,))
    node = tree.append(tree.root(""), run(0, 4), [[1, 2, 3, 4], [5, 6, -1, 8]])
    version, time = tree.version, node.access_time
    upper = tree.split(node, 1)
    assert (upper.num_locks, upper.access_time, node.num_locks) == (1, time, 1)
    assert upper.blocks == [[1], [5]] and node.blocks == [[2, 3, 4], [6, -1, 8]]
    assert tree.homes == {5: (upper, 1), 6: (node, 1), 8: (node, 1)}
    assert tree.version == version, "a split makes no match invalid"


def test_a_locked_leaf_grows_in_place_but_not_under_somebody_elses_lock() -> None:
    tree = RadixTree(BLOCK, 1)
    node = tree.append(tree.root(""), run(0, 1), [[1]])
    version = tree.version
    assert tree.append(node, run(4, 2), [[2, 3]]) is node
    assert node.blocks == [[1, 2, 3]] and tree.version > version
    node.num_locks = 2
    child = tree.append(node, run(12, 1), [[4]])
    assert child is not node and child.parent is node and child.num_locks == 1
    node.num_locks = 1
    assert tree.append(node, run(40, 1), [[5]]) is not node, "it has a child, so it cannot grow"


def test_ancestor_at_finds_or_makes_the_node_that_ends_there() -> None:
    tree = RadixTree(BLOCK, 1)
    put(tree, run(0, 4), 10)
    leaf = put(tree, run(0, 4) + run(60, 3), 20)
    assert tree.ancestor_at(leaf, 0) is leaf
    middle = leaf.parent
    assert tree.ancestor_at(leaf, 3) is middle
    upper = tree.ancestor_at(leaf, 5)
    assert upper.blocks == [[10, 11]] and middle is not None and middle.parent is upper
    assert tree.ancestor_at(leaf, 7) is tree.root("")


def test_drop_tail_shortens_a_leaf_and_removes_an_empty_one() -> None:
    tree = RadixTree(BLOCK, 2, tracked_groups=(0,))
    leaf = tree.append(tree.root(""), run(0, 3), [[1, -1, 3], [4, 5, 6]])
    assert tree.drop_tail(leaf, 1) == [[3], [6]]
    assert bytes(leaf.tokens) == run(0, 2) and set(tree.homes) == {1}
    other = tree.append(tree.root(""), run(80, 1), [[7], [8]])
    assert tree.drop_tail(leaf, 2) == [[1, -1], [4, 5]]
    root = tree.root("")
    assert list(root.children.values()) == [other] and root.keys == [run(80, 1)]
    other.num_locks = 0
    put(tree, run(80, 2), 50)
    with pytest.raises(AssertionError, match="only a leaf"):
        tree.drop_tail(other, 1)


def test_replace_block_keeps_the_lookup_true() -> None:
    tree = RadixTree(BLOCK, 1, tracked_groups=(0,))
    node = tree.append(tree.root(""), run(0, 2), [[1, 2]])
    version = tree.version
    assert tree.replace_block(node, 0, 1, 9) == 2
    assert tree.replace_block(node, 0, 0, -1) == 1
    assert tree.homes == {9: (node, 0)} and tree.version == version + 2


def test_namespaces_never_meet_and_bare_roots_are_forgotten() -> None:
    tree = RadixTree(BLOCK, 1)
    leaf = tree.append(tree.root("tenant"), run(0, 2), [[1, 2]])
    assert tree.descend(tree.root("other"), run(0, 2), 2 * tree.block_bytes) == (tree.root("other"), 0)
    assert tree.path_tokens(leaf) == ("tenant", run(0, 2))
    tree.drop_if_bare(tree.root("other"))
    tree.drop_if_bare(tree.root("tenant"))
    assert set(tree.roots) == {"tenant"}


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2, 3), (1, 2, 4), 2),
        ((), (1,), 0),
        ((1, 2), (1, 2, 9), 2),
        ((256,), (0,), 0),
    ],
)
def test_common_tokens(a: tuple[int, ...], b: tuple[int, ...], common: int) -> None:
    assert common_tokens(pack(*a), pack(*b)) == common == common_tokens(pack(*b), pack(*a))


@pytest.mark.parametrize("seed", range(3))
def test_the_closest_child_is_as_good_as_looking_at_all_of_them(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(BLOCK, 1)
    big = [0, 1, 255, 256, 65_536, 2**31]
    for block in range(60):
        put(tree, pack(*(rng.choice(big) for _ in range(BLOCK))), block)
    root = tree.root("")
    for _ in range(300):
        query = pack(*(rng.choice(big) for _ in range(rng.randint(0, BLOCK))))
        child, common = tree.closest_child(root, query)
        assert common == max(common_tokens(key, query) for key in root.keys)
        assert (child is None) == (common == 0)
        if child is not None:
            assert common_tokens(bytes(child.tokens), query) == common


@pytest.mark.parametrize("seed", range(3))
def test_random_paths_are_found_as_a_plain_dictionary_finds_them(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(2, 1)
    known: dict[bytes, int] = {}
    size, next_block = tree.block_bytes, 0
    for _ in range(400):
        tokens = pack(*(rng.randrange(2) for _ in range(2 * rng.randint(1, 8))))
        node, matched = tree.descend(tree.root(""), tokens, len(tokens))
        expected = next((n for n in range(len(tokens), 0, -size) if tokens[:n] in known), 0)
        assert matched == expected
        assert tree.path_tokens(node)[1] == tokens[:matched]
        path: list[int] = []
        while node.parent is not None:
            path = node.blocks[0] + path
            node = node.parent
        assert path == [known[tokens[: (i + 1) * size]] for i in range(matched // size)]
        if rng.random() < 0.7 and matched < len(tokens):
            for end in range(matched + size, len(tokens) + 1, size):
                known[tokens[:end]] = next_block + (end - matched) // size - 1
            put(tree, tokens, next_block)
            next_block += (len(tokens) - matched) // size
        elif rng.random() < 0.5:
            leaves = [leaf for leaf in tree.nodes() if not leaf.children]
            if leaves:
                leaf = rng.choice(leaves)
                whole = tree.path_tokens(leaf)[1]
                count = rng.randint(1, leaf.num_blocks)
                tree.drop_tail(leaf, count)
                for back in range(count):
                    del known[whole[: len(whole) - back * size]]

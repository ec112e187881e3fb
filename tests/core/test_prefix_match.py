"""How sliding windows bound a hit."""

from __future__ import annotations

import random

import pytest

from headrace.core.prefix_match import first_block_needed, fit_windows

Group = tuple[list[int], int]


def test_first_block_needed_is_that_of_the_oldest_token_in_the_window() -> None:
    assert first_block_needed(0, 4, 4) == 0
    assert first_block_needed(7, 4, 4) == 1  # position 7 attends to 4..7
    assert first_block_needed(8, 4, 4) == 1  # 5..8
    assert first_block_needed(8, 1, 4) == 2  # only itself
    assert first_block_needed(100, 1000, 4) == 0


def test_without_sliding_groups_all_fits() -> None:
    assert fit_windows([], 5, 3, 4) == (5, 3)


def test_a_hole_inside_the_window_shortens_the_hit_to_the_hole() -> None:
    # window 6 reads 5 tokens before the next one: two blocks of 4
    assert fit_windows([([1, 2, 3, 4], 6)], 4, 0, 4) == (4, 0)
    assert fit_windows([([-1, -1, 3, 4], 6)], 4, 0, 4) == (4, 0)
    assert fit_windows([([1, 2, -1, 4], 6)], 4, 0, 4) == (2, 0)
    assert fit_windows([([1, -1, -1, 4], 6)], 4, 0, 4) == (1, 0)
    assert fit_windows([([-1, -1, -1, 4], 6)], 4, 0, 4) == (0, 0)


def test_a_partial_ending_moves_the_window_on() -> None:
    # 16 + 3 tokens: the next one reads from token 14 on, so block 2 may be gone; without them it is needed
    assert fit_windows([([1, 2, -1, 4], 6)], 4, 3, 4) == (4, 3)
    assert fit_windows([([1, 2, -1, 4], 9)], 4, 3, 4) == (2, 0)


def presence(rng: random.Random, num_blocks: int) -> list[int]:
    return [block if rng.random() < 0.7 else -1 for block in range(num_blocks)]


def brute_force(groups: list[Group], num_blocks: int, num_partial: int, size: int) -> int:
    """The longest length all of whose window tokens are present, whole blocks first."""
    lengths = [num_blocks * size + num_partial, *range(num_blocks * size, -1, -size)]
    for length in lengths:
        end = length // size * size  # tokens of the partial block come from its source
        if all(
            ids[position // size] >= 0
            for ids, window in groups
            for position in range(max(0, length - window + 1), end)
        ):
            return length
    raise AssertionError("length 0 always fits")


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_trying_every_length_finds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        size, num_blocks = rng.choice([1, 2, 4, 8]), rng.randint(0, 12)
        num_partial = rng.randint(0, size - 1)
        groups = [(presence(rng, num_blocks), rng.randint(1, 30)) for _ in range(rng.randint(1, 3))]
        full, partial = fit_windows(groups, num_blocks, num_partial, size)
        assert full * size + partial == brute_force(groups, num_blocks, num_partial, size)
        assert partial in (0, num_partial)

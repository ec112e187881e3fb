"""The ledger: runs, the fence, and that no mistake passes unseen."""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.core.block_pool import BlockPool


def test_a_prompt_gets_one_run_from_the_low_end_and_single_blocks_come_from_the_high_end() -> None:
    pool = BlockPool(100)
    assert pool.allocate(1) == [99]
    assert pool.allocate(10) == list(range(10))
    assert pool.allocate(1) == [98]
    assert pool.allocate(5) == [10, 11, 12, 13, 14]
    assert pool.num_free == 100 - 17
    pool.check_integrity()


def test_a_run_is_found_behind_smaller_holes_which_stay_for_others() -> None:
    pool = BlockPool(20)
    ids = pool.allocate(20)
    pool.decref([1, 2, 5, 8, 9, 10, 11, 15])
    assert pool.allocate(4) == [8, 9, 10, 11]
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(1) == [15]
    assert pool.allocate(1) == [5]
    pool.decref(ids)
    pool.check_integrity()
    assert pool.num_free == 20


def test_without_a_run_the_longest_pieces_are_taken() -> None:
    pool = BlockPool(16)
    pool.allocate(16)
    pool.decref([0, 2, 4, 5, 8, 9, 10, 11])
    assert pool.allocate(8) == [8, 9, 10, 11, 4, 5, 0, 2]
    assert pool.num_free == 0
    pool.check_integrity()


def test_allocating_more_than_is_free_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="5 blocks wanted, 4 free"):
        BlockPool(4).allocate(5)


def test_a_block_read_by_a_step_in_flight_is_fenced_until_that_step_completed() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(4)
    pool.touch(ids[:2], 7)
    pool.touch(ids[1:3], 9)
    pool.decref(ids)
    assert (pool.num_free, pool.num_fenced) == (1, 3)
    assert sorted(pool.fenced_blocks()) == ids[:3]
    pool.advance(6)
    assert (pool.num_free, pool.num_fenced) == (1, 3)
    pool.advance(7)
    assert (pool.num_free, pool.num_fenced) == (2, 2)
    pool.check_integrity()
    pool.advance(9)
    assert (pool.num_free, pool.num_fenced) == (4, 0)
    pool.advance(3)  # never goes back
    assert pool.completed_step_id == 9
    pool.check_integrity()


def test_touch_never_lowers_and_decref_may_touch() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.touch([first], 5)
    pool.touch([first], 3)
    pool.decref([first, second], 4)
    assert pool.last_read_step[first] == 5 and pool.last_read_step[second] == 4
    assert pool.is_fenced(first) and pool.is_fenced(second)
    pool.advance(4)
    assert pool.num_free == 1 and pool.is_fenced(first)


def test_shared_blocks_are_free_when_the_last_holder_leaves() -> None:
    pool = BlockPool(3)
    ids = pool.allocate(3)
    pool.incref(ids)
    pool.decref(ids)
    assert pool.num_free == 0 and pool.ref_count == [1, 1, 1]
    pool.decref(ids)
    assert pool.num_free == 3


def test_absent_blocks_are_skipped() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.incref([-1, block, -1])
    pool.touch([-1, block], 2)
    pool.decref([block, -1, block])
    assert pool.ref_count == [0, 0, 0] and pool.last_read_step[:2] == [0, 0]
    pool.check_integrity()


def test_holding_what_nobody_holds_and_releasing_twice_are_caught() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="block 1"):
        pool.incref([1])
    with pytest.raises(AssertionError, match="block 2"):
        pool.decref([2])


@pytest.mark.parametrize("damage", ["ref_count", "num_free", "num_fenced", "fence", "flag"])
def test_check_integrity_sees_damage(damage: str) -> None:
    pool = BlockPool(8)
    ids = pool.allocate(4)
    pool.decref(ids[:1], 3)
    pool.check_integrity()
    if damage == "ref_count":
        pool.ref_count[7] += 1
    elif damage == "num_free":
        pool.num_free -= 1
    elif damage == "num_fenced":
        pool.num_fenced += 1
    elif damage == "fence":
        pool.last_read_step[ids[0]] = 2
    else:
        pool._is_free[ids[1]] = 1
    with pytest.raises(AssertionError):
        pool.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_agree_with_plain_sets(seed: int) -> None:
    rng = random.Random(seed)
    pool, free = BlockPool(60), set(range(60))
    held: dict[int, int] = {}
    fenced: dict[int, int] = {}
    step = 0
    for _ in range(3000):
        event = rng.random()
        if event < 0.35 and free:
            ids = pool.allocate(rng.randint(1, min(len(free), 9)))
            assert len(set(ids)) == len(ids) and free.issuperset(ids)
            free.difference_update(ids)
            held.update(dict.fromkeys(ids, 1))
        elif event < 0.5 and held:
            block = rng.choice(list(held))
            pool.incref([block])
            held[block] += 1
        elif event < 0.6 and held:
            pool.touch(rng.sample(list(held), rng.randint(1, len(held))), step + rng.randint(0, 3))
        elif event < 0.9 and held:
            for block in rng.sample(list(held), rng.randint(1, min(8, len(held)))):
                pool.decref([block])
                held[block] -= 1
                if not held[block]:
                    del held[block]
                    if pool.last_read_step[block] > step:
                        fenced[block] = pool.last_read_step[block]
                    else:
                        free.add(block)
        else:
            step += rng.randint(0, 2)
            pool.advance(step)
            done = {block for block, last in fenced.items() if last <= step}
            free |= done
            fenced = {block: last for block, last in fenced.items() if block not in done}
        assert pool.num_free == len(free) and sorted(pool.fenced_blocks()) == sorted(fenced)
        assert pool.ref_count == [held.get(block, 0) for block in range(60)]
    pool.check_integrity()


def test_prompts_keep_long_runs_while_answers_grow_block_by_block() -> None:
    """What the two ends are for: measured 52 blocks a run; a heap of free ids gives 1."""
    rng, pool = random.Random(0), BlockPool(4000)
    live: list[list[int]] = []
    num_blocks = num_runs = 0
    for turn in range(1500):
        wanted = rng.choice([4, 16, 64, 128])
        while pool.num_free < 400 + wanted:
            pool.decref(live.pop(rng.randrange(len(live))))
        ids = pool.allocate(wanted)
        if turn > 500:
            num_blocks += wanted
            num_runs += 1 + sum(b != a + 1 for a, b in itertools.pairwise(ids))
        live.append(ids)
        for other in rng.sample(live, min(len(live), 24)):
            other += pool.allocate(1)
    assert num_blocks / num_runs > 20

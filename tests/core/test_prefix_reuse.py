"""The prefix cache reuses what an exact LRU cache of the same size would, on every kind of trace."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.prefix import traces
from benchmarks.prefix.bench_prefix_reuse import pool_blocks, replay, simulate

SMALL = {
    "few-shot": partial(traces.few_shot, num_tasks=6, num_requests=60),
    "agent": partial(traces.agent, num_agents=10, num_turns=5),
    "tree-of-thought": partial(traces.tree_of_thought, num_problems=3),
    "multi-turn": partial(traces.multi_turn, num_chats=15, num_turns=4),
    "judge": partial(traces.judge, num_essays=10),
    "rag": partial(traces.rag, num_documents=20, num_requests=60),
}


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", SMALL)
def test_reuse_comes_up_to_an_exact_lru(name: str, share: float) -> None:
    trace = SMALL[name]()
    num_blocks = pool_blocks(trace, 16, share)
    ideal = simulate(trace, num_blocks, 16)
    assert ideal.num_hit_tokens > 0
    without_copies = replay(trace, num_blocks, 16, min_copy_tokens=16)
    assert 0.995 * ideal.num_hit_tokens <= without_copies.num_block_hit_tokens <= ideal.num_hit_tokens
    assert without_copies.num_copied_tokens == 0
    with_copies = replay(trace, num_blocks, 16)
    assert with_copies.num_block_hit_tokens >= 0.99 * ideal.num_hit_tokens
    assert with_copies.num_copied_tokens > 0


def test_traces_are_deterministic_and_all_different() -> None:
    assert set(traces.TRACES) == set(SMALL)
    made = [make() for make in SMALL.values()]
    assert made == [make() for make in SMALL.values()]
    assert len({len(trace[0].prompt) for trace in made}) > 1

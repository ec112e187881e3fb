"""Thousands of random operations over the KV memory, every slot's content and every count proved after each."""

from __future__ import annotations

import random

import pytest

from headrace.core.kv_cache_spec import KVCacheSpec
from tests.core.kv_simulation import KVSimulation, Sequence, TokenTier, full, make_request, sliding

VOCAB = 3


class Driver:
    """Chooses the operations."""

    def __init__(self, simulation: KVSimulation, seed: int) -> None:
        self.simulation = simulation
        self.rng = random.Random(seed)
        self.documents = [[self.rng.randrange(VOCAB) for _ in range(70)] for _ in range(3)]
        self.num_made = 0

    def new_sequence(self) -> Sequence:
        rng = self.rng
        script = rng.choice(self.documents)[: rng.randint(0, 50)] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(2, 30))
        ]
        prompt = script[: rng.randint(2, len(script))]
        request = make_request(prompt, f"r{self.num_made}", namespace=rng.choice(["", "", "tenant"]))
        self.num_made += 1
        return Sequence(request, script)

    def fork(self) -> None:
        parent = self.rng.choice(self.simulation.running)
        before = parent.request.num_computed_tokens
        if before < 2:
            return
        shared = self.rng.randint(1, before - 1)
        script = parent.script[: shared + 1] + [
            self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 20))
        ]
        known = min(shared + 1, parent.request.num_tokens)
        child = make_request(script[:known], f"r{self.num_made}", namespace=parent.request.namespace)
        self.num_made += 1
        if known > shared:
            self.simulation.fork(parent, Sequence(child, script), shared)

    def rollback(self) -> None:
        """Rejected drafts: tokens beyond the committed ones are computed again."""
        busy = {id(work.sequence) for step in self.simulation.flying for work in step.works}
        for sequence in self.simulation.running:
            request = sequence.request
            if id(sequence) not in busy and request.num_computed_tokens > request.num_committed_tokens:
                request.num_computed_tokens = request.num_committed_tokens

    def operate(self) -> None:
        simulation, rng = self.simulation, self.rng
        event = rng.random()
        if event < 0.12 and len(simulation.waiting) < 6:
            simulation.submit(self.new_sequence())
        elif event < 0.30 and simulation.waiting:
            simulation.admit(rng.choice(simulation.waiting), rng.choice([0, 0, 3]))
        elif event < 0.36 and simulation.running:
            self.fork()
        elif event < 0.42 and simulation.running:
            simulation.stop(rng.choice(simulation.running), resume=rng.random() < 0.5)
        elif event < 0.44:
            self.rollback()
        elif event < 0.46 and simulation.waiting:
            request = rng.choice(simulation.waiting).request
            simulation.kv.match(request, request.num_tokens - 1)
        elif event < 0.463:
            simulation.kv.reset_prefix_cache()
        elif event < 0.50 and simulation.tier is not None and simulation.tier.taken:
            simulation.tier.release_one()
        elif len(simulation.flying) < simulation.lag and event < 0.8:
            if not simulation.schedule() and not simulation.flying and simulation.running:
                simulation.stop(rng.choice(simulation.running), resume=True)  # nothing else can make room
        elif simulation.flying:
            simulation.complete()
        for sequence in list(simulation.running):
            if sequence.request.num_committed_tokens == len(sequence.script):
                simulation.stop(sequence, resume=False)


CASES: list[tuple[list[KVCacheSpec], int, int, int, bool, bool]] = [
    # groups, blocks, block size, steps in flight, tier, prefix caching
    ([full()], 40, 4, 1, False, True),
    ([full()], 30, 4, 2, True, True),
    ([full(0), sliding(6, 1), sliding(9, 2)], 90, 4, 3, False, True),
    ([sliding(5, 0), full(1), sliding(5, 2)], 70, 4, 4, True, True),
    ([sliding(7)], 24, 4, 2, True, True),
    ([full(0), full(1)], 300, 1, 2, False, True),
    ([sliding(1, 0), sliding(20, 1)], 40, 8, 3, False, True),
    ([full(0), sliding(6, 1)], 50, 4, 2, False, False),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_slot_and_count_is_right_after_each_operation(case: int) -> None:
    specs, num_blocks, block_size, lag, has_tier, caching = CASES[case]
    tier = TokenTier(random.Random(case)) if has_tier else None
    simulation = KVSimulation(
        specs, num_blocks, block_size, lag=lag, seed=case, tier=tier, enable_prefix_caching=caching
    )
    driver = Driver(simulation, seed=case)
    for _ in range(2500):
        driver.operate()
        simulation.check()
    assert simulation.num_forks > 20 and simulation.num_preemptions > 10
    stats = simulation.kv.stats()
    assert stats.num_query_tokens > 1000
    if caching:
        assert simulation.num_hit_tokens > 200 and stats.num_evicted_blocks > 100
        assert simulation.num_partial_hits > 5 or block_size == 1
    if tier is not None:
        assert tier.num_offered > 50
    simulation.drain()

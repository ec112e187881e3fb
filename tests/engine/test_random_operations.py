"""Random operations against the oracle: no order of events may change an answer or lose a block."""

from __future__ import annotations

import math
import random

import pytest

from headrace.core import prompt_pace
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.errors import RequestError
from tests.engine.core_harness import FULL, HYBRID, VOCAB, CoreHarness


def random_prompt(rng: random.Random, documents: list[list[int]]) -> list[int]:
    """Mostly a piece of a shared document with a tail of its own, so that prefixes meet inside blocks."""
    prompt = documents[rng.randrange(len(documents))][: rng.randint(0, 40)] if rng.random() < 0.8 else []
    return prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]


def submit(rng: random.Random, harness: CoreHarness, name: str, documents: list[list[int]]) -> None:
    options: dict[str, object] = {"n": rng.choice([1, 1, 1, 2, 4]), "priority": rng.randint(-2, 2)}
    if rng.random() < 0.5:
        options["stop_token_ids"] = rng.sample(range(VOCAB), 3)
    if rng.random() < 0.3:
        options["eos_token_ids"] = [rng.randrange(VOCAB)]
    if rng.random() < 0.2:
        options["bad_word_ids"] = [[VOCAB + 1, VOCAB + 2]]  # may not run ahead
    if rng.random() < 0.1:
        options["prompt_logprobs"] = 1
    if rng.random() < 0.3:
        options["namespace"] = "tenant"
    harness.add(name, random_prompt(rng, documents), rng.randint(1, 30), **options)


def storm(
    seed: int, num_operations: int, specs: list[KVCacheSpec], num_blocks: int, **options: object
) -> CoreHarness:
    """Submit, step, abort, stop one child, reset the cache, update the weights, at random."""
    rng = random.Random(seed)
    documents = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    harness = CoreHarness(specs, num_blocks, **options)  # type: ignore[arg-type]
    for number in range(num_operations):
        event = rng.random()
        if event < 0.22:
            submit(rng, harness, f"r{number}", documents)
        elif event < 0.26 and harness.core._families:
            harness.core.abort_requests([rng.choice(list(harness.core._families))])
        elif event < 0.29 and harness.core._families:
            name = rng.choice(list(harness.core._families))
            harness.core.abort_child(name, rng.randrange(4))
        elif event < 0.292:
            harness.core.reset_prefix_cache()
        elif event < 0.295:
            harness.core.abort_requests(list(harness.core._families))
            harness.core.update_weights("others")
        else:
            harness.step()
        harness.core.scheduler.check_integrity()
        if len(harness.core._families) > 30:
            harness.core.abort_requests(list(harness.core._families)[:5])
    harness.run()
    harness.check_answers()
    return harness


CASES = [
    (FULL, 40, {"max_steps_outstanding": 1}),
    (FULL, 40, {"max_steps_outstanding": 2, "lag": 1}),
    (FULL, 36, {"max_steps_outstanding": 3, "lag": 2, "policy": "priority"}),
    (HYBRID, 90, {"max_steps_outstanding": 4, "lag": 3}),
    (HYBRID, 80, {"max_steps_outstanding": 2, "policy": "priority", "max_prefill_chunk": 7}),
    (HYBRID, 80, {"max_steps_outstanding": 2, "prefix_caching": False}),
    (FULL, 40, {"max_steps_outstanding": 2, "batching": "prefill-first"}),
    (FULL, 40, {"max_steps_outstanding": 2, "batching": "static"}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_answers_and_blocks_survive_2500_random_operations(case: int) -> None:
    specs, num_blocks, options = CASES[case]
    harness = storm(case, 2500, specs, num_blocks, **options)
    assert harness.core.scheduler.lifecycle.num_preemptions > 0 or options.get("batching") == "static"


PACED: list[tuple[list[KVCacheSpec], int, dict[str, object]]] = [
    (FULL, 40, {"max_steps_outstanding": 2, "lag": 1}),
    (HYBRID, 90, {"max_steps_outstanding": 3, "lag": 2, "policy": "priority"}),
    (HYBRID, 80, {"max_steps_outstanding": 1, "policy": "longest-prefix", "max_prefill_chunk": 7}),
]


@pytest.mark.parametrize("case", range(len(PACED)))
def test_prompts_at_a_pace_survive_2500_random_operations(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pace, "EFFICIENT_ROWS", 6)
    monkeypatch.setattr(prompt_pace, "MIN_PROMPT_TOKENS", 2)
    specs, num_blocks, options = PACED[case]
    harness = storm(100 + case, 2500, specs, num_blocks, max_stall_ms=math.inf, **options)
    assert harness.core.scheduler.pace.is_on and harness.core.scheduler.lifecycle.num_preemptions > 0


def test_a_storm_of_500_cancels_leaves_no_block_held() -> None:
    rng = random.Random(7)
    harness = CoreHarness(
        HYBRID, 200, lag=1, max_steps_outstanding=2, max_num_seqs=32, max_num_batched_tokens=64
    )
    names = [f"r{i}" for i in range(500)]
    documents = [[rng.randrange(VOCAB) for _ in range(40)]]
    for name in names:
        submit(rng, harness, name, documents)
    rng.shuffle(names)
    for name in names:
        for _ in range(rng.randint(0, 2)):
            harness.step()
        harness.core.abort_requests([name])
    harness.run()
    harness.check_answers()
    assert all(answer.finish_reason is not None for answer in harness.answers.values())


def test_a_failing_request_ends_alone() -> None:
    from tests.engine.core_harness import next_token

    def failing(token_ids: list[int], child_index: int) -> int:
        if token_ids[0] == 49 and len(token_ids) > 6:
            raise RequestError("logits are not finite")
        return next_token(token_ids, child_index)

    harness = CoreHarness(lag=1, max_steps_outstanding=2, executor_options={"next_token": failing})
    harness.add("good", [1, 2, 3])
    harness.add("bad", [49, 2, 3])
    harness.add("other", [4, 5])
    harness.run()
    bad = harness.answers.pop(("bad", 0))
    assert bad.finish_reason == "error" and bad.message == "logits are not finite" and len(bad.token_ids) == 4
    harness.check_answers()


def test_what_a_failed_step_wrote_is_not_shared() -> None:
    from tests.engine.core_harness import next_token

    failures = ["logits are not finite"]

    def failing_once(token_ids: list[int], child_index: int) -> int:
        if failures:
            raise RequestError(failures.pop())
        return next_token(token_ids, child_index)

    harness = CoreHarness(max_steps_outstanding=1, executor_options={"next_token": failing_once})
    harness.add("broken", list(range(1, 14)))
    harness.run()
    assert harness.answers.pop(("broken", 0)).finish_reason == "error"
    harness.add("again", list(range(1, 14)))
    harness.run()
    assert harness.answers[("again", 0)].num_cached_tokens == 0
    harness.check_answers()

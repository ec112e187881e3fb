"""A stage that does not sample reads its tokens from the host, and only those that are still its requests'."""

from __future__ import annotations

import torch

from headrace.attention.base import AttentionShape
from headrace.attention.reference import ReferenceBackend
from headrace.core.output import NewRequest, SchedulerOutput
from headrace.runtime.early_stage_runner import EarlyStageRunner, StepTokens
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from headrace.sampling_params import SamplingParams
from tests.runtime.test_model_runner import BLOCK, CPU, NUM_BLOCKS, VOCAB, BigramModel


def make() -> EarlyStageRunner:
    specs = kv_cache_specs_for((None,), 1, 2, BLOCK, torch.float32)
    kv_cache = KVCache(specs, KVCacheLayout.for_specs(specs, 1, 2, BLOCK, torch.float32), NUM_BLOCKS)
    return EarlyStageRunner(
        BigramModel(kv_cache),
        kv_cache,
        [ReferenceBackend(AttentionShape(1, 1, 2), CPU)],
        max_num_seqs=2,
        max_model_len=20,
        vocab_size=VOCAB,
        max_logits_rows=64,
    )


def new(request_id: str, tokens: list[int], block: int) -> NewRequest:
    return NewRequest(request_id, tokens, len(tokens), [[block, block + 1]], SamplingParams(), 0)


def step(
    runner: EarlyStageRunner, step_id: int, names: list[str], starts: list[int], counts: list[int], **more
) -> torch.Tensor:
    """The ids that the forward was given."""
    output = SchedulerOutput(step_id, names, starts, counts, list(range(len(names))), **more)
    runner.execute_model(output)
    assert runner._result is not None
    ids = runner._result.hidden.clone()
    assert runner.sample_tokens().finish().sampled_token_ids == []
    return ids


def test_tokens_of_the_last_stage_are_the_next_inputs() -> None:
    runner = make()
    requests = [new("a", [1, 2, 3], 0), new("b", [4], 2)]
    assert step(runner, 1, ["a", "b"], [0, 0], [3, 1], new_requests=requests).tolist() == [1, 2, 3, 4]
    runner.take_tokens(StepTokens(1, ["a", "b"], [[50], [60]]))
    assert step(runner, 2, ["b", "a"], [1, 3], [1, 1]).tolist() == [60, 50]


def test_tokens_that_come_too_late_are_dropped() -> None:
    runner = make()
    step(runner, 1, ["a", "b"], [0, 0], [2, 1], new_requests=[new("a", [1, 2], 0), new("b", [4], 2)])
    # "a" is preempted and comes back, "b" makes way for "c", all before the tokens of step 1 arrive.
    back, other = new("a", [1, 2, 7], 4), new("c", [5, 6, 8], 6)
    step(runner, 2, ["a", "c"], [0, 0], [1, 1], new_requests=[back, other], removed_request_ids=["a", "b"])
    runner.take_tokens(StepTokens(1, ["a", "b"], [[50], [60]]))
    assert step(runner, 3, ["a", "c"], [1, 1], [2, 2]).tolist() == [2, 7, 6, 8]


def test_a_request_that_failed_brings_no_token() -> None:
    runner = make()
    step(runner, 1, ["a", "b"], [0, 0], [1, 1], new_requests=[new("a", [1], 0), new("b", [4], 2)])
    runner.take_tokens(StepTokens(1, ["b"], [[60]]))
    assert step(runner, 2, ["b"], [1], [1], removed_request_ids=["a"]).tolist() == [60]

"""The first stage gets its tokens from the last, when a step reads them, and only those of requests still there."""

from __future__ import annotations

import torch

from headrace.attention.base import AttentionShape
from headrace.attention.reference import ReferenceBackend
from headrace.core.output import NewRequest, SchedulerOutput
from headrace.runtime.early_stage_runner import EarlyStageRunner
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from headrace.sampling_params import SamplingParams
from tests.runtime.test_model_runner import BLOCK, CPU, NUM_BLOCKS, VOCAB, BigramModel


class Coming:
    """Tokens that come when they are waited for."""

    def __init__(self, sampled: list[list[int]], count: int) -> None:
        self._tokens = sampled.pop(0)
        assert len(self._tokens) == count
        self.num_waits = 0

    def wait(self) -> torch.Tensor:
        self.num_waits += 1
        return torch.tensor(self._tokens, dtype=torch.int32)


def make(sampled: list[list[int]] | None = None) -> EarlyStageRunner:
    """A first stage; ``sampled``: what the last one will sample in each step. Without: a stage in the middle."""
    specs = kv_cache_specs_for((None,), 1, 2, BLOCK, torch.float32)
    kv_cache = KVCache(specs, KVCacheLayout.for_specs(specs, 1, 2, BLOCK, torch.float32), NUM_BLOCKS)
    runner = EarlyStageRunner(
        BigramModel(kv_cache),
        kv_cache,
        [ReferenceBackend(AttentionShape(1, 1, 2), CPU)],
        max_num_seqs=2,
        max_model_len=20,
        vocab_size=VOCAB,
        max_logits_rows=64,
    )
    if sampled is not None:
        runner.expect = lambda count: Coming(sampled, count)
    return runner


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
    runner = make([[50, 60], [61, 51]])
    requests = [new("a", [1, 2, 3], 0), new("b", [4], 2)]
    assert step(runner, 1, ["a", "b"], [0, 0], [3, 1], new_requests=requests).tolist() == [1, 2, 3, 4]
    assert step(runner, 2, ["b", "a"], [1, 3], [1, 1]).tolist() == [60, 50]


def test_a_step_waits_for_what_it_reads_alone() -> None:
    runner = make([[50], [60], [51]])
    step(runner, 1, ["a"], [0], [1], new_requests=[new("a", [1], 0)])
    step(runner, 2, ["b"], [0], [1], new_requests=[new("b", [4], 2)])
    first, second = (each.tokens for each in runner._awaited)
    assert step(runner, 3, ["a"], [1], [1]).tolist() == [50]
    assert (first.num_waits, second.num_waits) == (1, 0)


def test_tokens_whose_request_has_left_are_dropped() -> None:
    runner = make([[50, 60], [70, 80], [71, 81]])
    step(runner, 1, ["a", "b"], [0, 0], [2, 1], new_requests=[new("a", [1, 2], 0), new("b", [4], 2)])
    # "a" is preempted and comes back, "b" makes way for "c", all before the tokens of step 1 arrive.
    back, other = new("a", [1, 2, 7], 4), new("c", [5, 6, 8], 6)
    step(runner, 2, ["a", "c"], [0, 0], [3, 3], new_requests=[back, other], removed_request_ids=["a", "b"])
    assert step(runner, 3, ["a", "c"], [0, 0], [4, 4]).tolist() == [1, 2, 7, 70, 5, 6, 8, 80]


def test_tokens_given_by_the_host_replace_what_was_sampled() -> None:
    runner = make([[50], [60], [70]])
    step(runner, 1, ["a"], [0], [1], new_requests=[new("a", [1], 0)])
    given = {"appended_token_ids": {"a": [8, 9]}, "kept_tokens": {"a": 1}}
    assert step(runner, 2, ["a"], [1], [2], **given).tolist() == [8, 9]
    assert step(runner, 3, ["a"], [3], [1]).tolist() == [60]


def test_graphs_get_their_tokens_before_they_start() -> None:
    runner, calls = make([[50], [60]]), []

    class Link:
        def receive(self, tensors: tuple[torch.Tensor, ...]) -> None:
            calls.append("received")

        def send(self, tensors: tuple[torch.Tensor, ...]) -> None:
            calls.append("sent")

    link = runner.link_to(Link())
    step(runner, 1, ["a"], [0], [1], new_requests=[new("a", [1], 0)])

    class Small:
        def run(self, layout: object) -> None:
            assert len(runner._awaited) == 1
            link.receive(())
            assert not runner._awaited and runner.states.tokens.tensor[0, 1] == 50
            link.send(())

    runner.small_steps = Small()
    step(runner, 2, ["a"], [1], [1])
    assert calls == ["received", "sent"]


def test_a_stage_in_the_middle_needs_no_tokens() -> None:
    runner = make()
    step(runner, 1, ["a"], [0], [1], new_requests=[new("a", [1], 0)])
    step(runner, 2, ["a"], [1], [1])
    assert not runner._awaited

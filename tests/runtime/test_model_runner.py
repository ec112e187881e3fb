"""ModelRunner with a model whose logits are a table: the next token's logits depend on the last token alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import ForwardBatch
from headrace.attention.reference import ReferenceBackend
from headrace.core.output import BlockCopy, SchedulerOutput
from headrace.core.token_mask import TokenMask
from headrace.layers.sliced_logits import SlicedLogits
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from headrace.runtime.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from tests.runtime.sampling_oracle import sample
from tests.runtime.step_maker import Sequence, StepMaker, describe

CPU = torch.device("cpu")
VOCAB, BLOCK, NUM_BLOCKS = 90, 4, 64


class BigramModel:
    """Stores each token's id as its key, so that block copies show."""

    def __init__(self, kv_cache: KVCache) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator) * 2
        self._keys = kv_cache.layer_views(0)[0]
        self.num_logits_rows: list[int] = []
        self._logits = torch.empty(64, VOCAB)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        mapping = batch.groups[0].slot_mapping
        self._keys[mapping // BLOCK, 0, mapping % BLOCK, 0] = batch.input_ids.float()
        return batch.input_ids

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        self.num_logits_rows.append(len(rows))
        out = self._logits[: len(rows)]
        out.copy_(self.table[hidden[rows]])
        return SlicedLogits(out)


def make(max_logits_rows: int = 64) -> tuple[ModelRunner, BigramModel, KVCache]:
    specs = kv_cache_specs_for((None,), 1, 2, BLOCK, torch.float32)
    layout = KVCacheLayout.for_specs(specs, 1, 2, BLOCK, torch.float32)
    kv_cache = KVCache(specs, layout, NUM_BLOCKS)
    model = BigramModel(kv_cache)
    backends = [ReferenceBackend(AttentionShape(1, 1, 2), CPU)]
    runner = ModelRunner(
        model,
        kv_cache,
        backends,
        max_num_seqs=8,
        max_model_len=60,
        vocab_size=VOCAB,
        max_logits_rows=max_logits_rows,
    )
    return runner, model, kv_cache


def run(runner: ModelRunner, output: SchedulerOutput, mask=None):
    runner.execute_model(output)
    return runner.sample_tokens(mask).finish()


def expected_tokens(model: BigramModel, sequence: Sequence, count: int) -> list[int]:
    new = describe(sequence)
    tokens = list(sequence.token_ids)
    for _ in range(count):
        token, is_sure = sample(model.table[tokens[-1]].numpy(), new, tokens)
        assert is_sure
        tokens.append(token)
    return tokens[sequence.num_prompt :]


def test_sampled_tokens_are_read_before_the_host_knows_them() -> None:
    runner, model, _ = make()
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    greedy = Sequence("a", [5, 6, 7], SamplingParams(temperature=0.0))
    drawn = Sequence("b", [8, 9], SamplingParams(temperature=1.5, top_p=0.9, frequency_penalty=0.5), 77, 2)
    wanted = {one.request_id: expected_tokens(model, one, 12) for one in (greedy, drawn)}
    outputs = [run(runner, maker.step([(greedy, 3), (drawn, 1)]))]
    outputs.append(run(runner, maker.step([(greedy, 1), (drawn, 1)])))
    outputs += [run(runner, maker.step([(drawn, 1), (greedy, 1)])) for _ in range(10)]
    got: dict[str, list[int]] = {"a": [], "b": []}
    for output in outputs:
        for request_id, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True):
            got[request_id] += tokens
    assert got["a"] == wanted["a"] and got["b"] == wanted["b"][:11]
    assert [output.step_id for output in outputs] == list(range(1, 13))


def test_a_preempted_request_goes_on_as_if_nothing_happened() -> None:
    runner, model, _ = make()
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    sequence = Sequence("a", [5, 6, 7], SamplingParams(temperature=1.0, repetition_penalty=1.3), 5)
    wanted = expected_tokens(model, sequence, 6)
    for _ in range(3):
        output = run(runner, maker.step([(sequence, len(sequence.token_ids) - sequence.num_computed)]))
        maker.take_in(sequence, output.sampled_token_ids[0])
    maker.remove(sequence)
    for _ in range(3):
        output = run(runner, maker.step([(sequence, len(sequence.token_ids) - sequence.num_computed)]))
        maker.take_in(sequence, output.sampled_token_ids[0])
    assert sequence.token_ids[3:] == wanted


def test_block_copies_run_before_the_forward() -> None:
    runner, _, kv_cache = make()
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    first = Sequence("a", [5, 6, 7, 8], SamplingParams())
    run(runner, maker.step([(first, 4)]))
    second = Sequence("b", [5, 6, 7, 9], SamplingParams(), num_computed=3)
    output = maker.step([(second, 1)])
    output.block_copies = [BlockCopy(first.blocks[0][0], second.blocks[0][0], 3)]
    run(runner, output)
    keys = kv_cache.layer_views(0)[0][second.blocks[0][0], 0, :, 0]
    assert keys.tolist() == [5.0, 6.0, 7.0, 9.0]


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_prompt_logprobs_in_chunks_of_bounded_size(max_rows: int) -> None:
    runner, model, _ = make(max_rows)
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    scored = Sequence("a", prompt, SamplingParams(prompt_logprobs=2, logprobs=0, temperature=0.0))
    other = Sequence("b", [7, 7], SamplingParams(temperature=0.0))
    found = []
    for batch in ([(scored, 4), (other, 2)], [(other, 1), (scored, 7)], [(scored, 1)]):
        output = run(runner, maker.step(batch))
        found += output.prompt_logprobs.get("a", [])
    assert max(model.num_logits_rows) <= max(max_rows, 2)
    assert [entry.token_ids[0] for entry in found] == prompt[1:]
    for before, entry in zip(prompt, found, strict=False):
        exact = torch.log_softmax(model.table[before], -1)
        order = exact.argsort(descending=True)[:2].tolist()
        assert entry.token_ids[1:] == order
        assert entry.logprobs == pytest.approx(exact[entry.token_ids].tolist(), abs=1e-5)
        assert entry.rank == 1 + int((exact > exact[entry.token_ids[0]]).sum())
    assert output.logprobs["a"][0].token_ids == output.sampled_token_ids[0]


def test_one_broken_row_ends_one_request() -> None:
    runner, model, _ = make()
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    model.table[13] = torch.nan
    bad = Sequence("bad", [13], SamplingParams(logprobs=1))
    good = Sequence("good", [14], SamplingParams(logprobs=1, temperature=0.0))
    output = run(runner, maker.step([(bad, 1), (good, 1)]))
    assert list(output.errors) == ["bad"] and "not finite" in output.errors["bad"]
    assert output.request_ids == ["good"] and output.sampled_token_ids == [[int(model.table[14].argmax())]]
    assert list(output.logprobs) == ["good"]
    run(runner, maker.step([(good, 1), (bad, 1)]))


def test_impossible_tokens_end_one_request() -> None:
    runner, _, _ = make()
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    bad = Sequence("bad", [5, VOCAB], SamplingParams())
    stuck = Sequence("stuck", [5], SamplingParams(allowed_token_ids=[3], bad_word_ids=[[3]]))
    good = Sequence("good", [14], SamplingParams())
    output = run(runner, maker.step([(bad, 1), (stuck, 1), (good, 1)]))
    assert f"token id {VOCAB} of the prompt" in output.errors["bad"]
    assert "no token may be sampled" in output.errors["stuck"]
    assert output.request_ids == ["good"]


def test_grammar_mask_rows_follow_the_sampled_requests() -> None:
    runner, _, _ = make()
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    chunk = Sequence("chunk", [1, 2, 3], SamplingParams())
    free = Sequence("free", [4], SamplingParams(temperature=0.0))
    bound = Sequence("bound", [5], SamplingParams(temperature=1.0))
    mask = TokenMask(np.array([1]), np.zeros((1, 3), np.uint32))
    mask.words[0, 2] = 1 << 7
    output = run(runner, maker.step([(chunk, 2), (free, 1), (bound, 1)]), mask)
    assert output.request_ids == ["free", "bound"] and output.sampled_token_ids[1] == [71]


def test_calls_out_of_turn_are_our_own_mistakes() -> None:
    runner, _, _ = make()
    maker = StepMaker(NUM_BLOCKS, BLOCK)
    with pytest.raises(AssertionError, match="needs one execute_model"):
        runner.sample_tokens()
    sequence = Sequence("a", [1], SamplingParams())
    runner.execute_model(maker.step([(sequence, 1)]))
    with pytest.raises(AssertionError, match="was not called"):
        runner.execute_model(maker.step([(sequence, 1)]))

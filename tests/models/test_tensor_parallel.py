"""A model cut over ranks, which are threads here, computes what it computes whole, and each rank reads its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from headrace.errors import ConfigError
from headrace.kernels.op_plan import record
from headrace.parallel.state import ParallelState
from tests.models.paged_model import PagedModel
from tests.models.tiny_models import GEMMA3, TINY_MODELS, VOCAB_SIZE, TinyModel, save
from tests.parallel.thread_group import run_ranks

MODELS = {
    "llama-biases": TINY_MODELS["llama-biases"],
    "qwen2": TINY_MODELS["qwen2"],
    "gemma3": TinyModel(transformers.Gemma3TextConfig, GEMMA3 | {"final_logit_softcapping": 4.0}),
}
TOKENS = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_the_number_of_ranks(name: str, size: int, tmp_path: Path) -> None:
    """With four ranks and two KV heads, pairs of ranks hold the same head."""
    folder = save(MODELS[name].make(), tmp_path)
    whole = PagedModel(folder)
    expected = torch.cat((whole.step([(0, TOKENS[:20])]), whole.step([(0, TOKENS[20:])])))

    def work(parallel: ParallelState) -> tuple[torch.Tensor, int]:
        paged = PagedModel(folder, parallel=parallel)
        plan = record(paged.model, paged.batch([(0, TOKENS[:1])]))
        first = paged.step([(0, TOKENS[:20])])
        hidden = plan.replay(paged.batch([(0, TOKENS[20:])]))
        second = paged.model.compute_logits(hidden, torch.arange(10)).whole().clone()
        return torch.cat((first, second)), paged.weights.bytes_read

    results = run_ranks(size, work)
    for logits, bytes_read in results:
        assert torch.equal(logits, results[0][0])
        assert (logits - expected).abs().max() <= 1e-4
        assert bytes_read < whole.weights.bytes_read * (0.6 if size == 2 else 0.4)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_share_of_the_bytes(size: int, tmp_path: Path) -> None:
    """Of safetensors, up to 5 % more: norms are everybody's."""
    options = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    folder = save(TinyModel(transformers.LlamaConfig, options).make(), tmp_path)
    whole = PagedModel(folder).weights.bytes_read
    read = run_ranks(size, lambda parallel: PagedModel(folder, parallel=parallel).weights.bytes_read)
    assert whole / size <= max(read) <= 1.05 * whole / size


class Forbidden:
    """The collectives of a rank that is alone and should know it."""

    def all_reduce(self, x: torch.Tensor) -> None:
        raise AssertionError("one rank adds nothing up")

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("one rank gathers nothing")


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_calls_no_collective(name: str, tmp_path: Path) -> None:
    folder = save(MODELS[name].make(), tmp_path)
    alone = PagedModel(folder, parallel=ParallelState(0, 1, Forbidden()))
    names = {call.name for call in record(alone.model, alone.batch([(0, TOKENS[:1])])).calls}
    assert "linear" in names and not names & {"all_reduce", "all_gather"}
    assert torch.equal(alone.step([(0, TOKENS[:20])]), PagedModel(folder).step([(0, TOKENS[:20])]))


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = save(TINY_MODELS["llama"].make(), tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide 4 attention heads"):
        PagedModel(folder, parallel=ParallelState(0, 3))

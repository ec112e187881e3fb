"""Whole engines over tensor-parallel ranks, which are threads here: tokens of one rank, and what is exchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from headrace.config import EngineConfig, ParallelConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import assemble
from headrace.parallel.state import ParallelState
from headrace.parallel.world import World
from headrace.runtime.executor import InProcessExecutor
from headrace.runtime.worker import Worker
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import make_model
from tests.parallel.thread_group import ThreadCommunicator, run_ranks
from tests.runtime.test_cuda_graph import add_small_steps

VOCAB = 157
MAX_SEQS = 8
PLAIN: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 5}]
MIXED: list[dict[str, Any]] = [
    *PLAIN,
    {"temperature": 0.7, "top_k": 20, "seed": 6},
    {"temperature": 0, "presence_penalty": 1.5},
]


class ThreadWorld(World):
    """A rank that is a thread."""

    def smallest(self, number: int) -> int:
        """All have the same."""
        return number


@dataclass
class Answers:
    """tokens: of each request.  gathered: bytes that this rank brought to each gather.  num_replays: of graphs."""

    tokens: dict[str, list[int]]
    gathered: list[int]
    num_replays: int


def run_engine(
    folder: Path, parallel: ParallelState, wishes: list[dict[str, Any]], is_graphed: bool
) -> Answers:
    config = EngineConfig.from_options(
        model=str(folder),
        dtype="float32",
        device="cpu",
        kernels="reference",
        threads=1,
        skip_tokenizer_init=True,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=24,
        max_model_len=96,
        num_kv_blocks=60,
        tensor_parallel_size=parallel.size,
    )
    world = ThreadWorld(parallel.rank, parallel.size, parallel.rank, parallel.size, tensor=parallel)
    worker = Worker(config.model, config.cache, config.scheduler, config.parallel, config.device, world=world)
    capture = add_small_steps(worker, MAX_SEQS) if is_graphed else None
    core = assemble(config, InProcessExecutor(worker, 1, False))
    tokens: dict[str, list[int]] = {}
    for number in range(10):
        ids = [(7 * number + place) % 90 + 3 for place in range(1 + number * 3)]
        params = SamplingParams(max_tokens=9, ignore_eos=True, **wishes[number % len(wishes)])
        core.add_request(EngineCoreRequest(f"r{number}", ids, params, 9))
    while core.has_work():
        for item in core.step():
            tokens.setdefault(item.request_id, []).extend(item.new_token_ids)
    core.shutdown()
    group = parallel.communicator
    gathered = group.gathered if isinstance(group, ThreadCommunicator) else []
    return Answers(tokens, gathered, sum(capture.num_replays) if capture is not None else 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a vocabulary that no number of ranks divides."""
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path, num_attention_heads=4, vocab_size=VOCAB)
    return path


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_plain_step_gathers_no_logits(folder: Path, size: int, is_graphed: bool) -> None:
    """Nor does any step of an engine whose requests are all plain: a candidate a row is all that ranks bring."""
    expected = run_engine(folder, ParallelState(), PLAIN, is_graphed=False)
    found = run_ranks(size, lambda parallel: run_engine(folder, parallel, PLAIN, is_graphed))
    for answers in found:
        assert answers.tokens == expected.tokens
        assert answers.gathered == found[0].gathered
        assert len(answers.gathered) > 20 and max(answers.gathered) <= 8 * MAX_SEQS
        assert answers.num_replays > 2 or not is_graphed


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("size", [2, 4])
def test_steps_of_some_that_need_whole_rows(folder: Path, size: int, is_graphed: bool) -> None:
    """Those gather them, behind the graph where there is one; once all others are left, steps are plain again."""
    expected = run_engine(folder, ParallelState(), MIXED, is_graphed=False)
    found = run_ranks(size, lambda parallel: run_engine(folder, parallel, MIXED, is_graphed))
    width = -(-VOCAB // size)
    for answers in found:
        assert answers.tokens == expected.tokens
        assert answers.gathered == found[0].gathered
        assert any(num_bytes % (4 * width) == 0 for num_bytes in answers.gathered)
        assert answers.num_replays > 2 or not is_graphed


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphs"])
def test_kept_or_gathered_at_once_the_tokens_are_the_same(folder: Path, is_graphed: bool) -> None:
    def gathering(parallel: ParallelState) -> Answers:
        return run_engine(folder, replace(parallel, keeps_slices=False), MIXED, is_graphed)

    kept = run_ranks(2, lambda parallel: run_engine(folder, parallel, MIXED, is_graphed))
    whole = run_ranks(2, gathering)
    assert [each.tokens for each in kept] == [each.tokens for each in whole]
    width = -(-VOCAB // 2)
    assert all(num_bytes % (4 * width) == 0 for num_bytes in whole[0].gathered)
    assert sum(whole[0].gathered) > sum(kept[0].gathered)


def test_the_setting_decides_whether_slices_are_kept() -> None:
    assert ParallelConfig().pick_in_parts
    for is_kept in (False, True):
        config = ParallelConfig(pick_in_parts=is_kept)
        place: dict[str, Any] = {"rank": 0, "local_rank": 0, "num_local_ranks": 1, "status": None}
        with (
            mock.patch("torch.distributed.init_process_group"),
            mock.patch("headrace.parallel.world.PrefixStore"),
        ):
            world = World.join(config, store=mock.Mock(), device=torch.device("cpu"), **place)
        assert world.tensor.keeps_slices == is_kept

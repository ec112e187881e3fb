"""A forward recorded once gives the same bits as the model itself, for steps of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.kernels.op_plan import Symbol, record
from tests.models.paged_model import PagedModel
from tests.models.tiny_models import ARCHITECTURES, TINY_MODELS, VOCAB_SIZE, save


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replay_equals_forward_bit_for_bit(name: str, tmp_path: Path) -> None:
    paged = PagedModel(save(TINY_MODELS[name].make(), tmp_path), num_requests=3)
    first = [(0, tokens(3, 1)), (1, tokens(2, 2))]
    plan = record(paged.model, paged.batch(first))
    paged.advance(first)
    for work in ([(1, tokens(1, 3))], [(0, tokens(1, 4)), (2, tokens(30, 5)), (1, tokens(6, 6))]):
        batch = paged.batch(work)
        before = paged.cache.blocks.clone()
        hidden, cache = paged.model.forward(batch).clone(), paged.cache.blocks.clone()
        paged.cache.blocks.copy_(before)
        assert torch.equal(plan.replay(batch), hidden)
        assert torch.equal(paged.cache.blocks, cache) and not torch.equal(before, cache)
        paged.advance(work)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_plan_is_flat_and_knows_no_step(name: str, tmp_path: Path) -> None:
    """The ops are those of the architecture, in order, and no argument is of the step that was recorded."""
    paged = PagedModel(save(TINY_MODELS[name].make(), tmp_path))
    batch = paged.batch([(0, tokens(5, 1))])
    plan = record(paged.model, batch)
    block = {
        "llama": [
            "linear",
            "rope_and_store",
            "attention",
            "linear",
            "add_rms_norm",
            "linear",
            "gated_act",
            "linear",
        ],
        "gemma3": [
            *("linear", "rope_and_store", "attention", "linear", "rms_norm"),
            *("add_rms_norm", "linear", "gated_act", "linear", "rms_norm"),
        ],
    }[name]
    names = [call.name for call in plan.calls]
    assert names[:2] == ["embedding", "rms_norm"]
    assert names[2:] == [*block, "add_rms_norm"] * paged.arch.num_layers
    ours = {tensor.untyped_storage().data_ptr() for tensor in (batch.input_ids, batch.positions)}
    ours |= {buffer.rows(5).untyped_storage().data_ptr() for buffer in paged.model.arena.buffers()}
    for call in plan.calls:
        assert any(isinstance(value, Symbol) for value in call.args)
        constants = [value for value in call.args if isinstance(value, torch.Tensor)]
        assert not ours & {value.untyped_storage().data_ptr() for value in constants}
        assert 5 not in [value for value in call.args if type(value) is int]

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headrace.checkpoint.model_config import ModelArchitecture
from headrace.loader.dummy import DummySource
from headrace.loader.tensor_names import expected_tensors, is_norm
from tests.loader.checkpoints import CONFIGS, architecture

UP = "model.layers.1.mlp.up_proj.weight"


def tensor(weights: DummySource, name: str, *index: slice) -> Tensor:
    return weights.get(name, index).dequantize(torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_tensors_of_the_architecture(name: str) -> None:
    arch = architecture(name)
    weights = DummySource(arch)
    for key, shape in expected_tensors(arch).items():
        made = weights.get(key, shape=shape).dequantize(torch.float32)
        assert tuple(made.shape) == shape
        assert (made == 1).all() if is_norm(key) else made.std() > 0
    weights.finish()
    assert weights.unused_names() == [] and weights.bytes_read == weights.total_bytes


def test_a_function_of_seed_and_name() -> None:
    arch = architecture("llama")
    first, again, other = DummySource(arch, 1), DummySource(arch, 1), DummySource(arch, 2)
    assert torch.equal(tensor(first, UP), tensor(again, UP))
    assert not torch.allclose(tensor(first, UP), tensor(other, UP), atol=0.01)
    assert not torch.allclose(tensor(first, UP), tensor(first, UP.replace("up", "gate")), atol=0.01)


@pytest.mark.parametrize(
    "index", [(slice(0, 48),), (slice(48, 96),), (slice(None), slice(16, 40)), (slice(7, 8), slice(63, 64))]
)
def test_slices_equal_the_same_slice_of_the_whole(index: tuple[slice, ...]) -> None:
    weights = DummySource(architecture("qwen2"))
    assert torch.equal(tensor(weights, UP, *index), tensor(weights, UP)[index])
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(tensor(weights, bias, slice(5, 40)), tensor(weights, bias)[5:40])


def test_looks_random() -> None:
    arch = architecture("llama", hidden_size=512, intermediate_size=1024, vocab_size=20_000)
    weights = DummySource(arch)
    matrix = tensor(weights, UP)
    assert abs(matrix.std().item() * 512**0.5 - 1) < 0.02 and abs(matrix.mean().item()) < 1e-3
    assert torch.linalg.matrix_rank(matrix) == 512
    embedding = tensor(weights, "model.embed_tokens.weight")
    assert len(embedding.unique(dim=0)) == 20_000
    correlations = (embedding[:500] @ embedding[:500].T).fill_diagonal_(0)
    assert correlations.abs().max() < 0.3


def test_comes_in_the_stored_dtype() -> None:
    arch = architecture("llama", torch_dtype="bfloat16")
    data = DummySource(arch).get(UP)
    assert data.tensor is not None and data.tensor.dtype == torch.bfloat16
    assert DummySource(architecture("llama")).get(UP).tensor.dtype == torch.float32  # type: ignore[union-attr]


def llama_8b() -> ModelArchitecture:
    return architecture(
        "llama",
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128_256,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )


def test_a_layer_of_8b_is_made_in_no_time() -> None:
    """218 million numbers; about 0.4 s of one core, most of it the system's handing out of memory."""
    weights = DummySource(llama_8b())
    layer = [name for name in weights.names() if name.startswith("model.layers.7.")]
    start = time.thread_time()
    total = sum(weights.get(name).dequantize(torch.bfloat16).numel() for name in layer)
    assert total == 218_112_000
    assert time.thread_time() - start < 4


def test_rows_that_a_rank_takes_differ_from_each_other() -> None:
    weights = DummySource(architecture("llama"))
    parts = [tensor(weights, UP, slice(start, start + 24)) for start in range(0, 96, 24)]
    assert all(not torch.allclose(left, right, atol=0.01) for left, right in pairwise(parts))

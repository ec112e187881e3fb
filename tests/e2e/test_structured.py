"""Constrained answers of a tiny model on the real data plane: the same tokens whatever overlaps and is jumped over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import assemble
from headrace.engine.constrained_steps import ConstrainedSteps
from headrace.engine.constraints import Constraints
from headrace.grammar.base import TokenVocabulary
from headrace.grammar.constraint_text import prepare
from headrace.runtime.executor import InProcessExecutor
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputsParams
from tests.e2e.tiny_models import VOCAB, make_model
from tests.grammar.small_vocabulary import END, SPECIAL, TOKENS, decode, encode

SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"enum": ["true", "null", "ace"]},
        "bc": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 120}, "maxItems": 3},
        "d": {"type": "string", "maxLength": 6},
    },
    "required": ["ab", "bc", "d"],
    "additionalProperties": False,
}
JSON = prepare(StructuredOutputsParams(json=SCHEMA).to_constraint())[0]
REGEX = StructuredOutputsParams(regex="(abc|abd){2,9}tru").to_constraint()
PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 40)), [11, 12]]


def vocabulary() -> TokenVocabulary:
    tokens = TOKENS + [b""] * (VOCAB - len(TOKENS))
    return TokenVocabulary(tokens, frozenset({SPECIAL, END}), (END,), encode)


def answers(
    folder: Path, jump_forward: bool, logprobs: int | None = None, **options: Any
) -> dict[str, list[int]]:
    """{request/child: token ids} of constrained requests beside a free one."""
    config = EngineConfig.from_options(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=256, num_kv_blocks=96,
        device="cpu", kernels="reference", **options,
    )  # fmt: skip
    core = assemble(config, InProcessExecutor.from_config(config))
    core._mask_source = Constraints(vocabulary, jump_forward=jump_forward)
    core._constrained = ConstrainedSteps(core.scheduler, core._mask_source)
    for number, prompt in enumerate(PROMPTS):
        for name, constraint, extra in (("json", JSON, {}), ("regex", REGEX, {"n": 2}), ("free", None, {})):
            params = SamplingParams(
                temperature=0.0 if number else 1.0, seed=number, max_tokens=60, logprobs=logprobs, **extra
            )
            core.add_request(
                EngineCoreRequest(
                    f"{name}{number}", prompt, params, 60, eos_token_ids=[END], constraint=constraint
                )
            )
    found: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    while core.has_work():
        for item in core.step():
            name = f"{item.request_id}/{item.child_index}"
            found.setdefault(name, []).extend(item.new_token_ids)
            if item.finish_reason is not None:
                reasons[name] = item.finish_reason
        core.scheduler.check_integrity()
    assert core.stats().num_constraint_violations == 0
    assert (core.stats().num_forced_tokens > 0) is (jump_forward and logprobs is None)
    core.shutdown()
    for name, ids in found.items():
        if name.startswith("json") and reasons[name] == "stop":
            assert list(json.loads(decode(ids))) == ["ab", "bc", "d"]
        assert name.startswith("free") or reasons[name] in ("stop", "length")
    assert any(reason == "stop" for name, reason in reasons.items() if name.startswith("json"))
    return found


def test_the_same_tokens(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    expected = answers(tmp_path, False, max_steps_outstanding=1, enable_prefix_caching=False)
    for steps_outstanding in (1, 2, 3):
        assert answers(tmp_path, True, max_steps_outstanding=steps_outstanding) == expected
    assert (
        answers(tmp_path, True, max_steps_outstanding=2, max_num_batched_tokens=16, max_num_seqs=8)
        == expected
    )
    assert answers(tmp_path, True, logprobs=1, max_steps_outstanding=2) == expected

"""Short answers of a tiny model by the engine core, to compare ways to run its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.sampling_params import SamplingParams


def answers(folder: Path, **options: Any) -> list[list[int]]:
    """Twelve greedy tokens after prompts of 1, 40 and 150."""
    config = EngineConfig.from_options(
        model=str(folder),
        max_num_seqs=8,
        skip_tokenizer_init=True,
        max_model_len=256,
        num_kv_blocks=300,
        max_num_batched_tokens=64,
        **options,
    )
    core = build_engine_core(config)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for number, length in enumerate((1, 40, 150)):
        core.add_request(EngineCoreRequest(str(number), list(range(3, 3 + length)), params, 12))
    found: dict[str, list[int]] = {}
    while core.has_work():
        for item in core.step():
            found.setdefault(item.request_id, []).extend(item.new_token_ids)
    core.shutdown()
    return [found[name] for name in sorted(found)]

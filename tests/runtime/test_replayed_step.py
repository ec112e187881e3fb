"""ReplayedStep against the model's own forward, through caches, prompts and decodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.runtime import worker
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import MAKERS, make_model


def answers(folder: Path, dtype: str) -> list[list[int]]:
    config = EngineConfig.from_options(
        model=str(folder),
        dtype=dtype,
        kernels="reference",
        threads=1,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        max_model_len=256,
        num_kv_blocks=300,
        max_num_batched_tokens=64,
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MAKERS)
def test_replaying_changes_no_token(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(name, tmp_path)
    replayed = answers(tmp_path, dtype)
    monkeypatch.setattr(worker, "ReplayedStep", lambda model: model)
    assert answers(tmp_path, dtype) == replayed
    assert all(len(tokens) == 12 for tokens in replayed)

"""NativeStep against the model's own forward, through caches, prompts and decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.kernels.native.library import NativeLibrary, load_library
from headrace.runtime import worker
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import MAKERS, make_model

if not isinstance(load_library(), NativeLibrary):
    pytest.skip("no native kernels", allow_module_level=True)


def answers(folder: Path, threads: int = 2) -> list[list[int]]:
    config = EngineConfig.from_options(
        model=str(folder),
        dtype="float32",
        kernels="native",
        threads=threads,
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


@pytest.mark.parametrize("name", MAKERS)
def test_one_call_a_step_changes_no_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(name, tmp_path)
    in_one_call = answers(tmp_path)
    monkeypatch.setattr(worker, "NativeStep", lambda model: model)
    assert answers(tmp_path) == in_one_call
    assert all(len(tokens) == 12 for tokens in in_one_call)


def test_more_threads_change_no_token(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    before = torch.get_num_threads()
    found = [answers(tmp_path, threads) for threads in (1, 2, 3)]
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]

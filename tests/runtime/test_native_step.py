"""NativeStep against the model's own forward, through caches, prompts and decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.kernels.native.library import NativeLibrary, load_library
from headrace.runtime.native_step import NativeStep
from tests.e2e.tiny_models import MAKERS, make_model
from tests.runtime import short_answers

if not isinstance(load_library(), NativeLibrary):
    pytest.skip("no native kernels", allow_module_level=True)


def answers(folder: Path, threads: int = 2) -> list[list[int]]:
    return short_answers.answers(folder, dtype="float32", kernels="native", threads=threads)


@pytest.mark.parametrize("name", MAKERS)
def test_one_call_a_step_changes_no_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(name, tmp_path)
    in_one_call = answers(tmp_path)
    monkeypatch.setattr(NativeStep, "_prepare", lambda self, plan, batch: plan.replay)
    monkeypatch.setattr(NativeStep, "best_tokens", lambda self, hidden, rows: None)
    assert answers(tmp_path) == in_one_call
    assert all(len(tokens) == 12 for tokens in in_one_call)


def test_more_threads_change_no_token(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    before = torch.get_num_threads()
    found = [answers(tmp_path, threads) for threads in (1, 2, 3)]
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]

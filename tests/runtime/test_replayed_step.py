"""ReplayedStep against the model's own forward, through caches, prompts and decodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.runtime import step_forms
from tests.e2e.tiny_models import MAKERS, make_model
from tests.runtime import short_answers


def answers(folder: Path, dtype: str) -> list[list[int]]:
    return short_answers.answers(folder, dtype=dtype, kernels="reference", threads=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MAKERS)
def test_replaying_changes_no_token(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(name, tmp_path)
    replayed = answers(tmp_path, dtype)
    monkeypatch.setattr(step_forms, "ReplayedStep", lambda model: model)
    assert answers(tmp_path, dtype) == replayed
    assert all(len(tokens) == 12 for tokens in replayed)

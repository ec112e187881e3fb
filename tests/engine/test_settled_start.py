"""A start's objects are frozen once a process, and thawed with their owner."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM
from headrace.config import EngineConfig
from headrace.engine import core_loop, settled_start
from headrace.engine.core_loop import CoreLoop
from headrace.engine.messages import CoreSpec, StopCore
from tests.e2e.tiny_models import make_model


class Owner:
    pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.unfreeze()
    monkeypatch.setattr(settled_start, "_is_settled", False)
    yield
    gc.unfreeze()


def test_what_is_there_is_frozen_until_its_owner_is_gone() -> None:
    owner, other = Owner(), Owner()
    settled_start.settle(owner)
    assert gc.get_freeze_count() > 1000
    settled_start.settle(other)
    del other
    assert gc.get_freeze_count() > 1000
    del owner
    assert gc.get_freeze_count() == 0


def test_it_can_be_taken_back_once() -> None:
    owner = Owner()
    unsettle = settled_start.settle(owner)
    unsettle()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # somebody else's
    unsettle()
    assert gc.get_freeze_count() > 0


def test_an_engine_in_this_process_is_frozen_until_it_is_shut_down(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64, num_kv_blocks=8, dtype="float32"):
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


class Idle:
    """A core that was made to be stopped, and messages that stop it."""

    def get(self, block: bool) -> object:
        return StopCore()


@pytest.mark.parametrize("owns_process", [True, False])
def test_only_a_core_that_owns_its_process_is_frozen(
    owns_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[object] = []
    monkeypatch.setattr(core_loop, "settle", settled.append)
    spec = CoreSpec("headrace.engine.null_core:build_null_core", EngineConfig(), {"tokens": [1]})
    CoreLoop(Idle(), lambda message: None, owns_process=owns_process).run(spec)  # type: ignore[arg-type]
    assert len(settled) == owns_process

"""Loading the library, and what happens where there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from headrace.errors import ConfigError
from headrace.kernels import registry
from headrace.kernels.native import library as library_module
from headrace.kernels.native.library import NativeError, NativeLibrary
from headrace.kernels.registry import OP_FILES, Ops, kernel_kinds


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load_library", lambda: "no compiler")
    library_module.warn_once.cache_clear()


def test_auto_takes_native_ops_and_the_reference_for_the_rest(native: NativeLibrary) -> None:
    for kernels in ("auto", "native"):
        table = Ops.for_device("cpu", kernels).table
        assert table["rms_norm"].__module__ == "headrace.kernels.native.norm"
        modules = {table[name].__module__.rsplit(".", 2)[1] for name in OP_FILES}
        assert modules <= {"native", "reference"}


def test_an_unknown_instruction_set_is_refused(native: NativeLibrary) -> None:
    before = native.instruction_set
    assert not native.choose_instruction_set("mmx") and native.instruction_set == before


def test_threads_are_torchs(native: NativeLibrary) -> None:
    assert native.shares_threads


@pytest.mark.usefixtures("no_library")
def test_without_a_library_plain_ops_run_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert kernel_kinds("cpu") == ["reference"]
    assert [record.message for record in caplog.records] == [
        "native CPU kernels are not used: no compiler; plain torch ops are slower"
    ]
    plain = Ops.for_device("cpu").table
    assert {plain[name].__module__.rsplit(".", 2)[1] for name in OP_FILES} == {"reference"}


@pytest.mark.usefixtures("no_library")
def test_native_kernels_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ConfigError, match="there are no native kernels: no compiler; set kernels to"):
        Ops.for_device("cpu", "native")


def test_native_kernels_are_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match="'cuda'"):
        Ops.for_device(torch.device("cuda"), "native")


def test_a_file_that_is_no_library_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "libheadrace_native.so"
    path.write_text("no library")
    with pytest.raises(NativeError, match=r"libheadrace_native\.so cannot be loaded"):
        NativeLibrary(path)

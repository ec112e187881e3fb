"""Files of cached blocks are told apart by every setting that changes the numbers of K and V, and by no other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig, option_owners
from headrace.runtime import cache_fingerprint
from headrace.runtime.executor import InProcessExecutor
from tests.e2e.tiny_models import make_model

PLAIN = {"skip_tokenizer_init": True, "max_model_len": 64, "num_kv_blocks": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama", folder, seed=2)
    return folder


def mark(llama: Path, tier_cache_dtype: str = "auto", **options: Any) -> bytes:
    executor = InProcessExecutor.from_config(
        EngineConfig.from_options(model=str(llama), **{**PLAIN, **options})
    )
    found = executor.cache_fingerprint(tier_cache_dtype)
    executor.shutdown()
    return found


def test_what_changes_the_numbers_is_told_apart(llama: Path) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "linear_inputs": "int8"},
        {"quantization": "int4", "linear_inputs": "float"},
        {"quantization": "int4", "kernels": "reference"},
        {"quantization_overrides": "model.layers.0.*=int8"},
        {"quantization_overrides": "model.layers.1.*=int8"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"tier_cache_dtype": "int8"},
        {"block_size": 32},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
    ]
    marks = [mark(llama, **case) for case in cases]
    alike = {
        (str(cases[one]), str(cases[other]))
        for one in range(len(cases))
        for other in range(one)
        if marks[one] == marks[other]
    }
    assert not alike


def test_what_changes_no_numbers_shares_files(llama: Path) -> None:
    assert mark(llama) == mark(
        llama,
        seed=3,
        num_kv_blocks=9,
        max_model_len=48,
        kv_cache_dtype="float32",
        threads=1,
        quantization="auto",
    )
    assert mark(llama, quantization="int4") == mark(llama, quantization="int4-g32-zp")


@pytest.mark.parametrize("is_replaced", [True, False])
def test_files_that_were_replaced_or_removed_after_loading_mark_nothing(
    llama: Path, tmp_path: Path, is_replaced: bool
) -> None:
    """Else blocks of the old weights would be found by an engine with the new ones."""
    folder, new = tmp_path / "model", tmp_path / "new"
    shutil.copytree(llama, folder)
    make_model("llama", new, seed=3)
    executor = InProcessExecutor.from_config(EngineConfig.from_options(model=str(folder), **PLAIN))
    before = executor.cache_fingerprint()
    assert before == executor.cache_fingerprint() == mark(folder)
    if is_replaced:
        (new / "model.safetensors").rename(folder / "model.safetensors")
    else:
        shutil.rmtree(folder)
    after = executor.cache_fingerprint()
    executor.shutdown()
    assert len(after) == 16 and after != before
    if is_replaced:
        assert after != mark(folder)


def test_every_setting_was_thought_of() -> None:
    named = set(re.findall(r"[a-z_]+", cache_fingerprint.__doc__ or ""))
    assert not set(option_owners()) - named, "say in the module's text whether K and V depend on it"

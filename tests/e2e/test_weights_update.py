"""Replacing the weights of a running engine: it answers as one that was started with them, and nothing of the old
weights is left in caches, programs or files."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.checkpoint.file_reader import FileReader
from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.engine_core import EngineCore
from headrace.errors import CheckpointError, ConfigError, EngineDeadError, RequestError
from headrace.outputs import RequestOutput
from headrace.platforms.cpu import CPUPlatform
from headrace.runtime import model_loader
from tests.e2e.tiny_models import make_model

PROMPTS = [[1, *range(10, 50)], [1, 7, 7, 9, 140, 33], [1, *range(60, 20, -1), 5]]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "num_kv_blocks": 64,
    "seed": 0,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

Answers = list[list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model with weights of two seeds, and one of another width."""
    root = tmp_path_factory.mktemp("models")
    paths = {name: root / name for name in ("a", "b", "wide", "longer")}
    make_model("llama", paths["a"], seed=1)
    make_model("llama", paths["b"], seed=2)
    make_model("llama", paths["wide"], seed=3, intermediate_size=128)
    make_model("llama", paths["longer"], seed=3, vocab_size=192)
    return paths


def llm_of(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{**SETTINGS, **options})


def outputs_of(llm: LLM) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)


def answers_of(llm: LLM) -> Answers:
    return [output.outputs[0].token_ids for output in outputs_of(llm)]


def fresh_answers(folder: Path, **options: Any) -> Answers:
    with llm_of(folder, **options) as llm:
        return answers_of(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "native"},
        {"kernels": "reference"},
        {"kernels": "native", "quantization": "int8"},
        {"kernels": "native", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_answers_are_those_of_an_engine_that_was_started_with_the_weights(
    folders: dict[str, Path], options: dict[str, Any]
) -> None:
    of_a, of_b = fresh_answers(folders["a"], **options), fresh_answers(folders["b"], **options)
    assert of_a != of_b
    with llm_of(folders["a"], **options) as llm:
        assert answers_of(llm) == of_a
        assert any(output.num_cached_tokens for output in outputs_of(llm))
        llm.update_weights(str(folders["b"]))
        first = outputs_of(llm)
        assert not any(output.num_cached_tokens for output in first), "a prefix of the old weights was used"
        assert [output.outputs[0].token_ids for output in first] == of_b
        assert answers_of(llm) == of_b
        llm.update_weights(str(folders["a"]))
        assert answers_of(llm) == of_a


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": None}, {"quantization": "int8"}], ids=str)
def test_on_a_gpu(folders: dict[str, Path], options: dict[str, Any]) -> None:
    """Graphs are made anew; where KV memory takes all there is, the old weights leave first."""
    options = {"device": "cuda", "dtype": "bfloat16", **options}
    of_a, of_b = fresh_answers(folders["a"], **options), fresh_answers(folders["b"], **options)
    with llm_of(folders["a"], **options) as llm:
        for _ in range(3):
            answers_of(llm)
        used = worker_of(llm)._platform.used_memory_bytes()
        for folder, expected in (("b", of_b), ("a", of_a), ("b", of_b)):
            llm.update_weights(folders[folder])
            first = outputs_of(llm)
            assert not any(output.num_cached_tokens for output in first)
            assert [output.outputs[0].token_ids for output in first] == expected
            answers_of(llm)
        assert worker_of(llm)._platform.used_memory_bytes() < used + (8 << 20)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("has_room", [True, False])
def test_the_old_model_is_let_go_of(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kernels: str, has_room: bool
) -> None:
    of_b = fresh_answers(folders["b"], kernels=kernels)
    with llm_of(folders["a"], kernels=kernels) as llm:
        answers_of(llm)
        worker = worker_of(llm)
        old = weakref.ref(worker._model)
        if not has_room:
            monkeypatch.setattr(CPUPlatform, "available_memory_bytes", lambda self: 0)
        seen = []
        load = model_loader.build_model
        monkeypatch.setattr(
            model_loader, "build_model", lambda arch, ctx: seen.append(old() is not None) or load(arch, ctx)
        )
        gc.disable()
        try:
            llm.update_weights(str(folders["b"]))
            assert old() is None
        finally:
            gc.enable()
        assert seen == [has_room]
        assert answers_of(llm) == of_b


def worker_of(llm: LLM) -> Any:
    return llm._core.executor._worker  # type: ignore[union-attr]


def test_replaced_files_are_read_again(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["a"], folder)
    with llm_of(folder) as llm:
        of_a = answers_of(llm)
        shutil.copytree(folders["b"], tmp_path / "next")
        folder.rename(tmp_path / "before")
        (tmp_path / "next").rename(folder)
        assert answers_of(llm) == of_a
        llm.update_weights()
        assert answers_of(llm) == fresh_answers(folders["b"])


def test_a_file_that_is_cut_while_it_is_copied_leaves_the_running_weights(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders["b"], tmp_path / "b")
    file = tmp_path / "b" / "model.safetensors"
    read_into, sizes = FileReader.read_into, list[int]()

    def cut_after_some(reader: FileReader, out: memoryview, begin: int) -> None:
        sizes.extend([len(out)] if len(out) else [])
        if len(sizes) == 5:
            os.truncate(file, begin + len(out) - 1)
        read_into(reader, out, begin)

    with llm_of(folders["a"]) as llm:
        of_a = answers_of(llm)
        with monkeypatch.context() as patch:
            patch.setattr(FileReader, "read_into", cut_after_some)
            with pytest.raises(CheckpointError, match=r"model.safetensors: was changed .* are needed"):
                llm.update_weights(str(tmp_path / "b"))
        assert len(sizes) == 5
        assert any(output.num_cached_tokens for output in outputs_of(llm)), "the cache is as it was"
        assert answers_of(llm) == of_a
        llm.update_weights(str(folders["b"]))
        assert answers_of(llm) == fresh_answers(folders["b"])


def test_dummy_weights_give_way_to_real_ones(folders: dict[str, Path]) -> None:
    with llm_of(folders["a"], load_format="dummy") as llm:
        assert answers_of(llm) != fresh_answers(folders["a"])
        llm.update_weights()
        assert answers_of(llm) == fresh_answers(folders["a"])


def test_files_of_the_disk_tier_are_used_under_their_own_weights_only(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    of_a, of_b = fresh_answers(folders["a"]), fresh_answers(folders["b"])
    tiers = {"host_cache_bytes": 1 << 20, "disk_cache_path": str(tmp_path), "num_kv_blocks": 18}
    with llm_of(folders["a"], **tiers) as llm:
        core = llm._core
        assert core is not None
        assert answers_of(llm) == of_a
        fill(llm)  # what was cached leaves the device
        wait_written(core)
        num_of_a = core.stats().num_disk_blocks
        assert num_of_a and core.stats().num_host_blocks
        llm.update_weights(str(folders["b"]))
        stats = core.stats()
        assert stats.num_host_blocks == stats.num_disk_blocks == stats.num_cached_blocks == 0
        hits = stats.disk_hit_tokens + stats.host_hit_tokens
        assert answers_of(llm) == of_b
        assert core.stats().disk_hit_tokens + core.stats().host_hit_tokens == hits
        llm.update_weights(str(folders["a"]))
        assert core.stats().num_disk_blocks == num_of_a and core.stats().num_host_blocks == 0
        assert answers_of(llm) == of_a
        assert core.stats().disk_hit_tokens > stats.disk_hit_tokens


def fill(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [1, 3 + index, *range(100, 150)]} for index in range(12)]
    llm.generate(prompts, GREEDY, use_tqdm=False)


def wait_written(core: EngineCore) -> None:
    tiers = core._tiers
    assert tiers is not None
    tiers._disk.shutdown()  # type: ignore[union-attr]
    tiers.poll_loaded()
    tiers._disk = tiers._reopen_disk()  # type: ignore[misc]


def test_other_models_and_damaged_files_are_refused_and_the_old_weights_go_on(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    cut, bare = tmp_path / "cut", tmp_path / "bare"
    for folder in (cut, bare):
        shutil.copytree(folders["b"], folder)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (bare / "model.safetensors").unlink()
    with llm_of(folders["a"]) as llm:
        of_a = answers_of(llm)
        for folder, error, words in [
            (folders["wide"], ConfigError, "intermediate_size is 128, and must be 96"),
            (folders["longer"], ConfigError, "vocab_size is 192, and must be 160"),
            (cut, CheckpointError, "model.safetensors"),
            (bare, CheckpointError, "bare"),
            (tmp_path / "nowhere", CheckpointError, "nowhere"),
            (Path("some/model"), ConfigError, "download it first"),
            (Path("some", "m" * 5000), CheckpointError, "the old ones go on"),
        ]:
            with pytest.raises(error, match=words):
                llm.update_weights(folder)
        assert any(output.num_cached_tokens for output in outputs_of(llm)), (
            "the cache was forgotten for nothing"
        )
        assert answers_of(llm) == of_a


def test_another_compute_type_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bf16 weights are computed in bf16, as not every CPU does."""
    monkeypatch.setattr(CPUPlatform, "_has_fast_bf16", lambda self: True)
    make_model("llama", tmp_path, seed=2).bfloat16().save_pretrained(tmp_path)
    with llm_of(folders["a"], dtype="auto") as llm, pytest.raises(ConfigError, match=r"bfloat16.*float32"):
        llm.update_weights(str(tmp_path))
    with llm_of(folders["a"]) as llm:  # one that was told its type takes them
        llm.update_weights(str(tmp_path))
        assert answers_of(llm) == fresh_answers(tmp_path)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_failure_half_way_leaves_the_old_weights_or_none(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    with llm_of(folders["a"]) as llm:
        of_a = answers_of(llm)
        if not has_room:
            monkeypatch.setattr(CPUPlatform, "available_memory_bytes", lambda self: 0)

        def fail(*_: Any) -> None:
            raise OSError("the disk is gone")

        monkeypatch.setattr(model_loader, "build_model", fail)
        error = CheckpointError if has_room else EngineDeadError
        with pytest.raises(error, match="the disk is gone"):
            llm.update_weights(str(folders["b"]))
        if has_room:
            assert answers_of(llm) == of_a
        else:
            with pytest.raises(EngineDeadError):
                answers_of(llm)


@pytest.fixture
def core(folders: dict[str, Path]) -> Iterator[EngineCore]:
    core = build_engine_core(EngineConfig.from_options(model=str(folders["a"]), **SETTINGS))
    yield core
    core.shutdown()


def test_it_is_refused_while_a_request_runs(core: EngineCore, folders: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    core.add_request(EngineCoreRequest("r", PROMPTS[0], params, 30))
    core.step()
    with pytest.raises(RequestError, match="1 requests are unfinished") as refusal:
        core.update_weights(str(folders["b"]))
    assert refusal.value.code == "requests_unfinished"
    core.abort_requests(["r"])
    core.update_weights(str(folders["b"]))  # steps in flight are no requests
    core.scheduler.kv.check_integrity([])
    assert [item.finish_reason for item in core.step()] == ["abort"]
    assert core.stats().num_weight_updates == 1


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_all_ranks_replace_their_parts(folders: dict[str, Path], sizes: dict[str, int]) -> None:
    of_a, of_b = fresh_answers(folders["a"], **sizes), fresh_answers(folders["b"], **sizes)
    with llm_of(folders["a"], **sizes) as llm:
        assert answers_of(llm) == of_a
        with pytest.raises(ConfigError, match="intermediate_size"):
            llm.update_weights(str(folders["wide"]))
        assert answers_of(llm) == of_a
        llm.update_weights(str(folders["b"]))
        assert answers_of(llm) == of_b
        llm.update_weights(str(folders["a"]))
        assert answers_of(llm) == of_a


@pytest.mark.parametrize("in_process", [True, False])
def test_an_engine_that_serves_many_at_once(folders: dict[str, Path], in_process: bool) -> None:
    of_b = fresh_answers(folders["b"])[0]

    async def run() -> None:
        config = EngineConfig.from_options(model=str(folders["a"]), **SETTINGS)
        llm = AsyncLLM.from_config(config, in_process=in_process)

        async def answer(**changes: Any) -> list[int]:
            params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes})
            last: list[int] = []
            async for output in llm.generate({"prompt_token_ids": PROMPTS[0]}, params):
                last = list(output.outputs[0].token_ids)
            return last

        try:
            before = await answer()
            with pytest.raises(ConfigError, match="vocab_size"):
                await llm.update_weights(str(folders["longer"]))
            running = asyncio.create_task(answer(max_tokens=200))
            await asyncio.sleep(0)
            while not llm.num_unfinished:
                await asyncio.sleep(0.001)
            with pytest.raises(RequestError, match="unfinished"):
                await llm.update_weights(str(folders["b"]))
            await running
            assert await answer() == before != of_b
            updating = asyncio.create_task(llm.update_weights(str(folders["b"])))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert await answer() == of_b  # it came while the weights were read
            await updating
            assert llm.metrics.core_stats["num_weight_updates"] == 1
        finally:
            await llm.shutdown()

    asyncio.run(run())

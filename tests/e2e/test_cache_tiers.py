"""Tiers under a real model: answers do not change, and files serve the next process."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace import LLM, SamplingParams
from headrace.core.load_times import LoadTimes
from headrace.core.scheduler import Scheduler
from headrace.errors import ConfigError
from headrace.kv_transfer.disk_store import DiskStore
from headrace.kv_transfer.host_memory import HostMemory
from headrace.kv_transfer.transfer import BlockTransfer
from tests.e2e.tiny_models import VOCAB, Comparison, greedy_reference, make_model

NUM_OUTPUT = 8


def documents() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, VOCAB) for _ in range(90)] for _ in range(5)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("llama")
    model = make_model("llama", folder, seed=2)
    return folder, [greedy_reference(model, prompt, NUM_OUTPUT) for prompt in documents()]


def run(folder: Path, references: list[Any], rounds: int = 3, is_lossy: bool = False, **options: Any) -> Any:
    """Every document in turn, over a device cache that holds about two of them.

    is_lossy: blocks are rounded: most first tokens, which are computed from them, stay as they are.
    """
    llm = LLM(
        str(folder),
        **{
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 128,
            "num_kv_blocks": 16,
            **options,
        },
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    comparison = Comparison()
    for _ in range(rounds):
        for number, (prompt, reference) in enumerate(zip(documents(), references, strict=True)):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            comparison.add(f"document {number}", reference, output.outputs[0].token_ids)
            llm._core.scheduler.check_integrity()  # type: ignore[union-attr]
    if is_lossy:
        firsts = [failure for failure in comparison.failures if ": token 0 " in failure]
        assert len(firsts) <= 0.4 * rounds * len(references), comparison.failures
    else:
        comparison.check()
    stats = llm._core.stats()  # type: ignore[union-attr]
    llm.shutdown()
    return stats


@pytest.fixture(autouse=True)
def loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a copy takes beside other work; a tiny model computes as fast."""
    monkeypatch.setattr(LoadTimes, "expected_ms", lambda self, places: 0.0)


@pytest.fixture
def prompt_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are there when the engine goes on, however slow the disk of the day is."""
    write = DiskStore.write

    def write_and_wait(self: DiskStore, key: bytes, payload: memoryview) -> BlockTransfer | None:
        transfer = write(self, key, payload)
        self._thread.submit(int).result()
        return transfer

    monkeypatch.setattr(DiskStore, "write", write_and_wait)


def test_the_engine_sleeps_while_blocks_leave(
    llama: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for their room would keep the thread that copies from running by asking all the time."""
    store, schedule = HostMemory._store, Scheduler.schedule
    num_idle = []

    def slow(self: HostMemory, block: int, slot: int, transfer: BlockTransfer) -> None:
        late = threading.Timer(0.05, lambda: store(self, block, slot, transfer))
        late.daemon = True
        late.start()

    def counted(self: Scheduler) -> Any:
        output = schedule(self)
        if output is None and self.kv.cache.evictor.in_transfer:
            num_idle.append(1)
        return output

    monkeypatch.setattr(HostMemory, "_store", slow)
    monkeypatch.setattr(Scheduler, "schedule", counted)
    stats = run(*llama, rounds=1, host_cache_bytes=64 << 20)
    assert stats.num_stored_blocks > 8
    assert 1 <= len(num_idle) < 800, "some four waits of 50 ms, one look each 0.5 ms at most"


def test_host_memory_gives_back_what_the_device_dropped(llama: tuple[Path, list[Any]]) -> None:
    stats = run(*llama, host_cache_bytes=64 << 20)
    assert stats.num_stored_blocks > 20 and stats.host_hit_tokens >= 10 * 64
    assert stats.num_failed_blocks == 0
    without = run(*llama)
    assert without.host_hit_tokens == 0 and without.num_computed_tokens > 2 * stats.num_computed_tokens


@pytest.mark.usefixtures("prompt_disk")
def test_files_serve_the_next_engine(llama: tuple[Path, list[Any]], tmp_path: Path) -> None:
    tiers = {"host_cache_bytes": 8 * 3 * 2 * 2 * 16 * 16 * 4, "disk_cache_path": str(tmp_path)}
    first = run(*llama, **tiers)
    assert first.num_host_blocks <= 8 and first.num_disk_blocks > 15 and first.disk_hit_tokens > 0
    second = run(*llama, rounds=1, **tiers)
    assert second.disk_hit_tokens >= 3 * 64
    other = run(*llama, rounds=1, **tiers, block_size=32, num_kv_blocks=8)
    assert other.disk_hit_tokens == 0, "another layout's files are not looked at"
    for file in tmp_path.glob("*/*.kv"):
        file.write_bytes(file.read_bytes()[:-7])
    third = run(*llama, rounds=1, **tiers)
    assert third.disk_hit_tokens == 0


@pytest.mark.usefixtures("prompt_disk")
def test_damaged_files_cost_time_only(llama: tuple[Path, list[Any]], tmp_path: Path) -> None:
    tiers = {"host_cache_bytes": 8 * 3 * 2 * 2 * 16 * 16 * 4, "disk_cache_path": str(tmp_path)}
    run(*llama, **tiers)
    for index, file in enumerate(sorted(tmp_path.glob("*/*.kv"))):
        data = bytearray(file.read_bytes())
        data[100 + index] ^= 1
        file.write_bytes(data)
    stats = run(*llama, rounds=1, **tiers)
    assert stats.num_failed_blocks > 0 and stats.disk_hit_tokens == 0
    healed = run(*llama, rounds=1, **tiers)
    assert healed.num_failed_blocks <= 8, "those of the last documents, which never left the device"
    assert healed.disk_hit_tokens >= 2 * 64


def test_compressed_tiers_hold_more_and_change_few_answers(llama: tuple[Path, list[Any]]) -> None:
    room = 12 * 3 * 2 * 2 * 16 * 16 * 4  # of a dozen blocks, of about thirty
    plain = run(*llama, host_cache_bytes=room)
    small = run(*llama, host_cache_bytes=room, tier_cache_dtype="int8", is_lossy=True)
    assert plain.num_host_blocks <= 12 < small.num_host_blocks
    assert small.host_hit_tokens > plain.host_hit_tokens and small.num_failed_blocks == 0


def folders_in(path: Path) -> set[Path]:
    """Those that hold blocks."""
    return {file.parent for file in path.glob("*/*.kv")}


@pytest.mark.usefixtures("prompt_disk")
def test_files_of_another_form_are_never_read(llama: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Each form has a folder of its own; a quantized cache has one form only."""
    tiers = {"host_cache_bytes": 1 << 20, "disk_cache_path": str(tmp_path), "is_lossy": True}
    num_folders = 0
    for kv in ("auto", "int8"):
        for form in ("auto", "int8", "int4"):
            stats = run(*llama, rounds=1, **tiers, tier_cache_dtype=form, kv_cache_dtype=kv)
            is_new = kv == "auto" or form == "auto"
            num_folders += is_new
            assert len(folders_in(tmp_path)) == num_folders
            assert (stats.disk_hit_tokens == 0) == is_new
    again = run(*llama, rounds=1, **tiers, tier_cache_dtype="int8")
    assert again.disk_hit_tokens > 0


@pytest.mark.usefixtures("prompt_disk")
@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"quantization_overrides": "model.layers.*=int8"}]
)
def test_files_of_other_weights_are_never_read(
    llama: tuple[Path, list[Any]], tmp_path: Path, options: dict[str, Any]
) -> None:
    tiers = {"host_cache_bytes": 1 << 20, "disk_cache_path": str(tmp_path)}
    assert run(*llama, rounds=1, **tiers).num_disk_blocks > 5
    rounded = run(*llama, rounds=1, is_lossy=True, **tiers, **options)
    assert rounded.disk_hit_tokens == 0 and len(folders_in(tmp_path)) == 2


def test_what_cannot_have_tiers_is_refused(llama: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder = tmp_path / "gemma3"
    make_model("gemma3", folder)
    with pytest.raises(ConfigError, match="sliding"):
        LLM(str(folder), skip_tokenizer_init=True, num_kv_blocks=200, host_cache_bytes=1 << 20)
    with pytest.raises(ConfigError, match="host_cache_bytes"):
        LLM(str(llama[0]), skip_tokenizer_init=True, num_kv_blocks=20, disk_cache_path=str(tmp_path))
    for size in ("tensor_parallel_size", "pipeline_parallel_size"):
        with (
            mock.patch("headrace.runtime.multiproc_executor.MultiprocExecutor") as ranks,
            pytest.raises(ConfigError, match="one device, and the parallel sizes ask for 2"),
        ):
            LLM(str(llama[0]), skip_tokenizer_init=True, host_cache_bytes=1 << 20, **{size: 2})
        assert not ranks.called, "nothing is loaded for it"
    odd = tmp_path / "odd"
    make_model("llama", odd, head_dim=12)
    with pytest.raises(ConfigError, match="tier_cache_dtype 'int4' needs a head size"):
        LLM(
            str(odd),
            skip_tokenizer_init=True,
            num_kv_blocks=20,
            host_cache_bytes=1 << 20,
            tier_cache_dtype="int4",
        )
    with pytest.raises(ConfigError, match="host_cache_bytes is 10"):
        LLM(str(llama[0]), skip_tokenizer_init=True, num_kv_blocks=20, host_cache_bytes=10)


@pytest.mark.usefixtures("prompt_disk")
def test_a_reset_tells_of_files_that_could_not_be_removed(
    llama: tuple[Path, list[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = llama
    llm = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        num_kv_blocks=16,
        host_cache_bytes=1 << 22,
        disk_cache_path=str(tmp_path),
    )
    for prompt in documents():
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    first, *others = sorted(tmp_path.glob("*/*.kv"))
    first.unlink()
    first.mkdir()  # no user, not even root, unlinks a folder
    core = llm._core
    assert core is not None
    assert core.call_cache("reset", {}) == {"is_empty": True}
    while not (left := core.call_cache("files_left", {}))["is_done"]:
        time.sleep(1e-3)
    llm.shutdown()
    assert left["num_files_left"] == 1 and left["files_left_reason"]
    assert others and not any(path.exists() for path in others)
    assert sum("could not be removed" in record.getMessage() for record in caplog.records) == 1

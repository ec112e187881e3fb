from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.source import ModelSource
from headrace.errors import CheckpointError, ConfigError
from headrace.loader.base import WeightSource, open_weights
from tests.loader.checkpoints import architecture, config, random_tensors, write_folder, write_gguf

ARCH = architecture("llama")
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(params=["hf", "gguf"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSource:
    if request.param == "hf":
        return write_folder(tmp_path / "model", config("llama"), random_tensors(ARCH))
    return write_gguf(tmp_path / "model.gguf", ARCH, random_tensors(ARCH))


def test_auto_and_the_right_format_open(source: ModelSource) -> None:
    own = "gguf" if source.kind == "gguf" else "safetensors"
    other = "safetensors" if source.kind == "gguf" else "gguf"
    for load_format in ("auto", own):
        assert open_weights(source, ARCH, load_format).has(QUERY)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"load_format='{other}'.*use 'auto', '{own}' or 'dummy'"):
        open_weights(source, ARCH, other)  # type: ignore[arg-type]


def test_dummy_needs_no_files(tmp_path: Path) -> None:
    weights = open_weights(ModelSource("hf", tmp_path / "nothing", "nothing"), ARCH, "dummy", seed=3)
    assert weights.shape(QUERY) == (128, 64)


def test_progress_and_bytes_add_up(source: ModelSource) -> None:
    calls: list[tuple[int, int]] = []
    weights = open_weights(source, ARCH, progress=lambda done, total: calls.append((done, total)))
    for name in weights.names():
        weights.get(name)
    assert weights.bytes_read == weights.total_bytes == calls[-1][0]
    assert calls == sorted(calls) and {total for _, total in calls} == {weights.total_bytes}


def test_progress_is_completed_though_a_rank_reads_only_its_part(source: ModelSource) -> None:
    calls: list[tuple[int, int]] = []
    weights = open_weights(source, ARCH, progress=lambda done, total: calls.append((done, total)))
    weights.get(QUERY, (slice(0, 64),))
    weights.finish()
    assert calls == [(64 * 64 * 4, weights.total_bytes), (weights.total_bytes, weights.total_bytes)]


def test_left_over_tensors_give_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {f"model.layers.{number}.self_attn.q_proj.scale": torch.ones(1) for number in range(9)}
    ignorable = {
        "lm_head.weight": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    source = write_folder(tmp_path, config("llama"), random_tensors(ARCH) | extra | ignorable)
    weights = open_weights(source, ARCH)
    for name in random_tensors(ARCH):
        weights.get(name)
    assert sorted(weights.unused_names()) == sorted(extra)
    with caplog.at_level(logging.WARNING):
        weights.finish()
    assert len(caplog.records) == 1
    assert "9 tensors are not used by the model: 'model.layers.0.self_attn.q_proj.scale'" in caplog.text


def test_a_complete_load_warns_of_nothing(source: ModelSource, caplog: pytest.LogCaptureFixture) -> None:
    weights = open_weights(source, ARCH)
    for name in weights.names():
        weights.get(name)
    weights.finish()
    assert not caplog.records


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_missing_tensors_are_found_before_anything_loads(kind: str, tmp_path: Path) -> None:
    tensors = random_tensors(ARCH)
    del tensors[QUERY], tensors["model.norm.weight"]
    source = (
        write_folder(tmp_path, config("llama"), tensors)
        if kind == "hf"
        else write_gguf(tmp_path / "m.gguf", ARCH, tensors)
    )
    with pytest.raises(CheckpointError) as caught:
        open_weights(source, ARCH)
    assert str(source.path) in str(caught.value) and QUERY in str(caught.value)
    assert "2 of 20 tensors are missing" in str(caught.value)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_wrong_shapes_are_found_before_anything_loads(kind: str, tmp_path: Path) -> None:
    tensors = random_tensors(ARCH) | {"model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64)}
    source = (
        write_folder(tmp_path, config("llama"), tensors)
        if kind == "hf"
        else write_gguf(tmp_path / "m.gguf", ARCH, tensors)
    )
    with pytest.raises(
        CheckpointError, match=r"up_proj.*has shape \[95, 64\], but the model needs \[96, 64\]"
    ):
        open_weights(source, ARCH)


def opened(source: ModelSource) -> WeightSource:
    return open_weights(source, ARCH)


def test_get_checks_name_shape_and_bounds(source: ModelSource) -> None:
    weights = opened(source)
    with pytest.raises(CheckpointError, match=r"'model\.nothing\.weight' is missing; there are 20 others"):
        weights.get("model.nothing.weight")
    with pytest.raises(CheckpointError, match=r"has shape \[128, 64\], but the model needs \[64, 128\]"):
        weights.get(QUERY, shape=(64, 128))
    with pytest.raises(CheckpointError, match=r"rows 100 to 130 of dimension 0 do not exist"):
        weights.get(QUERY, (slice(100, 130),))
    assert weights.unused_names()


def test_quantized_checkpoints_are_left_to_their_method(tmp_path: Path) -> None:
    settings = config("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    arch = architecture("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    tensors = random_tensors(ARCH)
    del tensors[QUERY]
    packed = {QUERY.replace("weight", "qweight"): torch.zeros(8, 128, dtype=torch.int32)}
    weights = open_weights(write_folder(tmp_path, settings, tensors | packed), arch)
    data = weights.get(QUERY.replace("weight", "qweight"))
    assert data.tensor is not None and data.tensor.dtype == torch.int32


def weights_file(source: ModelSource) -> Path:
    """The one file that holds the tensors."""
    return source.path if source.kind == "gguf" else source.path / "model.safetensors"


def test_a_file_that_was_cut_is_refused_before_anything_is_read(source: ModelSource) -> None:
    file = weights_file(source)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="it was cut off"):
        open_weights(source, ARCH)


@pytest.mark.parametrize("reads_before", [False, True])
def test_a_file_that_is_cut_after_its_header_was_read(source: ModelSource, reads_before: bool) -> None:
    """To touch the lost bytes would end the process."""
    file = weights_file(source)
    weights = open_weights(source, ARCH)
    if reads_before:  # and so mapped
        weights.get("model.norm.weight")
    num_bytes = file.stat().st_size
    os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match=f"was changed .* it had {num_bytes} bytes and has 4096"):
        weights.get(QUERY)


def test_a_file_that_is_overwritten_in_place_does_not_become_half_of_a_model(source: ModelSource) -> None:
    file = weights_file(source)
    weights = open_weights(source, ARCH)
    for name in weights.names():
        weights.get(name)
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\1\2\3\4")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))  # a clock may be coarser than this test is fast
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        weights.finish()

"""Building models: known architectures, weights that do not fit, and where errors point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.checkpoint import ModelArchitecture, load_architecture, resolve_model
from headrace.checkpoint.model_config import KNOWN_ARCHITECTURES
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.loader.dummy import DummySource
from headrace.models.registry import MODELS, build_model
from tests.layers.dict_weights import DictWeights, context
from tests.models.paged_model import PagedModel
from tests.models.tiny_models import ARCHITECTURES, TINY_MODELS, VOCAB_SIZE, save


def saved(name: str, folder: Path) -> tuple[ModelArchitecture, dict[str, torch.Tensor]]:
    save(TINY_MODELS[name].make(), folder)
    return load_architecture(resolve_model(str(folder))), load_file(folder / "model.safetensors")


def test_every_architecture_that_can_be_read_can_be_run() -> None:
    assert set(MODELS) == set(KNOWN_ARCHITECTURES)


def test_unknown_architectures_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    arch, tensors = saved("llama", tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"'mamba' is not supported .*gemma3, llama, mistral, qwen2, qwen3"
    ):
        build_model(replace(arch, architecture="mamba"), context(DictWeights(tensors)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_tensor_is_optional_and_none_is_left_over(name: str, tmp_path: Path) -> None:
    arch, tensors = saved(name, tmp_path)
    source = DictWeights(tensors)
    build_model(arch, context(source))
    assert source.unused_names() == []
    for missing in tensors:
        rest = {key: tensor for key, tensor in tensors.items() if key != missing}
        with pytest.raises(CheckpointError, match=f"'{missing}' is missing"):
            build_model(arch, context(DictWeights(rest)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_s_shape_is_checked(name: str, tmp_path: Path) -> None:
    arch, tensors = saved(name, tmp_path)
    for wrong, tensor in tensors.items():
        longer = torch.cat((tensor, tensor[:1]))
        with pytest.raises(CheckpointError) as error:
            build_model(arch, context(DictWeights(tensors | {wrong: longer})))
        for part in (f"'{wrong}'", str(list(tensor.shape)), str(list(longer.shape))):
            assert part in str(error.value)


def test_a_cut_down_folder_names_the_tensor(tmp_path: Path) -> None:
    _, tensors = saved("qwen3", tmp_path)
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_norm"):
        PagedModel(tmp_path)


def test_quantized_checkpoints_of_unknown_methods_are_refused(tmp_path: Path) -> None:
    arch, tensors = saved("llama", tmp_path)
    quantized = replace(arch, quantization={"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedModelError, match="quantized with 'bitsandbytes'"):
        build_model(quantized, context(DictWeights(tensors)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dummy_weights_give_sensible_logits(name: str, tmp_path: Path) -> None:
    arch, _ = saved(name, tmp_path)
    paged = PagedModel(tmp_path, weights=DummySource(arch, seed=3))
    logits = paged.step([(0, torch.arange(1, 30))])
    assert logits.isfinite().all() and 0.1 < logits.std() < 10.0
    assert logits.shape == (29, VOCAB_SIZE)


def test_rotary_tables_end_at_max_model_len(tmp_path: Path) -> None:
    arch, tensors = saved("gemma3", tmp_path)
    model = build_model(arch, context(DictWeights(tensors), max_model_len=33))
    assert {model.rotary_table(layer).shape for layer in range(arch.num_layers)} == {(33, arch.head_dim)}
    assert model.rotary_table(0) is model.rotary_table(1) is not model.rotary_table(2)
    whole = build_model(arch, context(DictWeights(tensors)))
    assert len(whole.rotary_table(0)) == arch.max_position_embeddings

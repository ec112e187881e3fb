"""Which files may take the place of a running model's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import ModelSource, load_architecture, resolve_model
from headrace.checkpoint.gguf_types import GGMLType
from headrace.config import ModelConfig
from headrace.errors import CheckpointError, ConfigError, EngineDeadError
from headrace.runtime.model_loader import ModelFiles
from headrace.runtime.weights_update import check_same_forms, check_same_type, replacement_of, replacing
from tests.e2e.tiny_models import make_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", folder)
    source = resolve_model(str(folder))
    return ModelFiles(ModelConfig(model=str(folder), revision="main"), source, load_architecture(source))


def test_without_a_path_the_same_files_are_meant(files: ModelFiles) -> None:
    assert replacement_of(files, None) == files
    dummy = replace(files, config=replace(files.config, load_format="dummy"))
    assert replacement_of(dummy, None).config.load_format == "auto"


def test_end_of_text_ids_and_the_stored_type_may_differ(files: ModelFiles, tmp_path: Path) -> None:
    make_model("llama", tmp_path, eos_token_id=7).bfloat16().save_pretrained(tmp_path)
    found = replacement_of(files, str(tmp_path))
    assert found.source.path == tmp_path and found.config.revision is None
    assert found.arch.eos_token_ids == (7,) and found.arch.torch_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 2),
        ("rms_norm_eps", 1e-3),
        ("num_key_value_heads", 3),
        ("tie_word_embeddings", True),
    ],
)
def test_what_is_computed_must_be_the_same(
    files: ModelFiles, tmp_path: Path, name: str, value: object
) -> None:
    make_model("llama", tmp_path, **{name: value})
    with pytest.raises(ConfigError, match=r"another model than the one that runs: \w+ is .*, and must be"):
        replacement_of(files, str(tmp_path))


def test_another_kind_of_files_is_refused(files: ModelFiles) -> None:
    running = replace(files, source=ModelSource("gguf", Path("m.gguf"), "m"))
    with pytest.raises(ConfigError, match="kind of its files is hf, and must be gguf"):
        replacement_of(running, str(files.source.path))


def test_forms_and_types_that_differ_are_named(files: ModelFiles) -> None:
    running = {"a": GGMLType.Q8_0, "b": None}
    check_same_forms(files, running, running)
    with pytest.raises(ConfigError, match="the type of a is Q4_K, and must be Q8_0"):
        check_same_forms(files, running, {"a": GGMLType.Q4_K, "b": None})
    with pytest.raises(ConfigError, match="the type of b is Q4_K, and must be dense"):
        check_same_forms(files, running, {"a": GGMLType.Q8_0, "b": GGMLType.Q4_K})
    with pytest.raises(ConfigError, match="start the engine with dtype"):
        check_same_type(files, torch.float32, torch.bfloat16)


def test_failures_say_what_has_become_of_the_engine() -> None:
    words = r"folder.*OSError: gone.*the old ones go on"
    with pytest.raises(CheckpointError, match=words), replacing("folder", is_intact=True):
        raise OSError("gone")
    with pytest.raises(ConfigError, match="its own words"), replacing("folder", is_intact=True):
        raise ConfigError("its own words")
    with pytest.raises(EngineDeadError, match="start the engine again"), replacing("folder", is_intact=False):
        raise ConfigError("too late")

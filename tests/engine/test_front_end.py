from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.config import ModelConfig
from headrace.engine.front_end import FrontEnd
from headrace.errors import CheckpointError, ConfigError, RequestError
from headrace.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import byte_tokenizer

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 300,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [7, 9],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without weights and without a tokenizer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(byte_tokenizer()._backend.to_str())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


def test_the_packaged_model() -> None:
    front_end = FrontEnd.open(ModelConfig())
    assert front_end.max_model_len == 8192 and front_end.source.name == "smollm2"
    request, _ = front_end.inputs.process("r", "Hello there", SamplingParams())
    assert front_end.tokenizer is not None
    assert request.prompt_token_ids == front_end.tokenizer.encode("Hello there")
    assert request.eos_token_ids == [2]


def test_without_a_tokenizer(model: Path) -> None:
    front_end = FrontEnd.open(ModelConfig(model=str(model), skip_tokenizer_init=True))
    request, _ = front_end.inputs.process("r", [1, 299], SamplingParams(max_tokens=None))
    assert (request.max_tokens, request.eos_token_ids) == (46, [7, 9])
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        front_end.inputs.process("r", "text", SamplingParams())


def test_a_missing_tokenizer_is_an_error(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        FrontEnd.open(ModelConfig(model=str(model)))


def test_a_tokenizer_of_its_own(model: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    front_end = FrontEnd.open(ModelConfig(model=str(model), tokenizer=str(tmp_path / "tokenizer")))
    request, _ = front_end.inputs.process("r", "ab", SamplingParams())
    assert len(request.prompt_token_ids) == 2
    assert request.eos_token_ids == [7, 9, 256]  # the tokenizer's own end of text counts too


def test_the_tokenizer_of_another_model(model: Path) -> None:
    front_end = FrontEnd.open(ModelConfig(model=str(model), tokenizer="smollm2"))
    assert front_end.tokenizer is not None and front_end.tokenizer.vocab_size > CONFIG["vocab_size"]
    with pytest.raises(RequestError, match="vocabulary"):  # its ids do not fit this model
        front_end.inputs.process("r", "Hello there", SamplingParams())


@pytest.mark.parametrize(("wanted", "length"), [(None, 48), (48, 48), (20, 20)])
def test_max_model_len(model: Path, wanted: int | None, length: int) -> None:
    config = ModelConfig(model=str(model), skip_tokenizer_init=True, max_model_len=wanted)
    assert FrontEnd.open(config).max_model_len == length


def test_max_model_len_beyond_the_models(model: Path) -> None:
    with pytest.raises(ConfigError, match="48 tokens"):
        FrontEnd.open(ModelConfig(model=str(model), skip_tokenizer_init=True, max_model_len=49))

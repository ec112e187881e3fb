"""ModelArchitecture.from_hf_config against transformers' own config classes, and against configs as published."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import ModelArchitecture, ModelSource, load_architecture
from headrace.checkpoint.model_config import RopeConfig, RopeScaling
from headrace.errors import CheckpointError, UnsupportedModelError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def read(config: dict[str, Any], **changes: Any) -> ModelArchitecture:
    return ModelArchitecture.from_hf_config(config | changes, where="folder/config.json")


def test_llama_as_published() -> None:
    model = read(LLAMA, bos_token_id=1, eos_token_id=[2, 7], rope_theta=500000.0, torch_dtype="bfloat16")
    assert (model.architecture, model.hidden_size, model.num_layers) == ("llama", 64, 3)
    assert (model.num_attention_heads, model.num_kv_heads, model.head_dim) == (8, 2, 8)
    assert model.rope == RopeConfig(500000.0)
    assert model.local_rope_theta is None
    assert model.layer_windows == (None, None, None)
    assert model.query_scale == 8**-0.5
    assert (model.bos_token_id, model.eos_token_ids, model.pad_token_id) == (1, (2, 7), None)
    assert model.torch_dtype == "bfloat16"
    assert not model.tie_word_embeddings
    assert not (model.attention_bias or model.attention_output_bias or model.mlp_bias or model.qk_norm)
    assert model.embedding_scale == 1.0
    assert model.quantization is None
    assert model.raw["vocab_size"] == 300


def test_llama_3_rope_scaling() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = read(LLAMA, rope_scaling=scaling, rope_theta=500000.0, max_position_embeddings=131072)
    assert model.rope == RopeConfig(
        500000.0,
        RopeScaling(
            "llama3",
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    )
    assert model.max_context_tokens == 131072
    assert read(LLAMA, rope_parameters=scaling | {"rope_theta": 500000.0}).rope == model.rope


def test_other_rope_scalings() -> None:
    linear = read(LLAMA, rope_scaling={"type": "linear", "factor": 4})
    assert linear.rope == RopeConfig(10000.0, RopeScaling("linear", factor=4.0))
    yarn = read(
        LLAMA,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        max_position_embeddings=32768,
    )
    assert yarn.rope.scaling == RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32768)
    assert yarn.max_context_tokens == 131072
    for kind in ("dynamic", "longrope", "su"):
        with pytest.raises(
            UnsupportedModelError, match=rf"rope scaling '{kind}' is not supported \(known: default"
        ):
            read(LLAMA, rope_scaling={"type": kind, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5"):
        read(LLAMA, partial_rotary_factor=0.5)


def test_mistral_windows() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert read(mistral, sliding_window=16).layer_windows == (16, 16, 16)
    assert read(mistral, sliding_window=None).layer_windows == (None, None, None)
    assert read(mistral).layer_windows == (4096, 4096, 4096)
    without = {key: value for key, value in mistral.items() if key != "num_key_value_heads"}
    assert read(without).num_kv_heads == 8
    assert read(mistral, head_dim=32).head_dim == 32


def test_qwen2_windows() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}
    assert read(qwen).layer_windows == (None, None, None)
    assert read(qwen, use_sliding_window=True).layer_windows == (None, 16, 16)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(qwen, use_sliding_window=True, layer_types=types).layer_windows == (16, None, 16)
    assert read(qwen).attention_bias
    assert not read(qwen).attention_output_bias
    with pytest.raises(UnsupportedModelError, match="'chunked_attention' is not supported"):
        read(qwen, layer_types=["chunked_attention"] * 3)
    with pytest.raises(CheckpointError, match="'layer_types' is not a list of 3"):
        read(qwen, layer_types=["full_attention"])


def test_gemma3_nested_as_published_relies_on_defaults() -> None:
    """gemma-3-4b's config.json leaves heads, head_dim and vocabulary to the defaults of the config class."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    model = read(config)
    assert model.architecture == "gemma3"
    assert (model.num_attention_heads, model.num_kv_heads, model.head_dim) == (8, 4, 256)
    assert model.vocab_size == 262208
    assert model.tie_word_embeddings and model.qk_norm
    assert model.hidden_act == "gelu_pytorch_tanh"
    assert model.rope == RopeConfig(1_000_000.0, RopeScaling("linear", factor=8.0))
    assert model.local_rope_theta == 10_000.0
    assert model.layer_windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert model.query_scale == 256**-0.5
    assert model.embedding_scale == math.sqrt(2560)
    assert model.eos_token_ids == (1, 106)
    assert model.torch_dtype == "bfloat16"
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        read(config, text_config=config["text_config"] | {"use_bidirectional_attention": True})


def transformers_configs() -> list[tuple[str, dict[str, Any]]]:
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 500,
    }
    return [
        ("LlamaConfig", small),
        ("LlamaConfig", small | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        (
            "LlamaConfig",
            small | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        ),
        ("MistralConfig", small | {"sliding_window": 8, "head_dim": 32}),
        ("MistralConfig", small | {"sliding_window": None}),
        ("Qwen2Config", small | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("Qwen2Config", small | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("Qwen3Config", small | {"head_dim": 32, "attention_bias": True}),
        ("Gemma3TextConfig", small | {"head_dim": 32, "query_pre_attn_scalar": 100, "sliding_window": 8}),
        ("Gemma3TextConfig", small | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}),
        ("Gemma3TextConfig", small | {"sliding_window_pattern": 3}),
    ]


@pytest.mark.parametrize(("class_name", "settings"), transformers_configs())
def test_agrees_with_transformers(class_name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, class_name)(**settings)
    theirs.save_pretrained(tmp_path)
    ours = load_architecture(ModelSource("hf", tmp_path, "tiny"))
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_attention_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    default_head_dim = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == getattr(theirs, "head_dim", default_head_dim)
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.hidden_act == getattr(theirs, "hidden_act", getattr(theirs, "hidden_activation", None))
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == getattr(theirs, "attention_bias", class_name == "Qwen2Config")
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    types = getattr(theirs, "layer_types", None)
    if class_name == "MistralConfig":
        assert set(ours.layer_windows) == {theirs.sliding_window}
    elif types is not None:
        expected = [theirs.sliding_window if kind == "sliding_attention" else None for kind in types]
        assert list(ours.layer_windows) == expected
    rope = theirs.rope_parameters
    if class_name == "Gemma3TextConfig":
        assert ours.local_rope_theta == rope["sliding_attention"]["rope_theta"]
        assert ours.query_scale == theirs.query_pre_attn_scalar**-0.5
        assert ours.attn_logit_softcap == theirs.attn_logit_softcapping
        assert ours.final_logit_softcap == theirs.final_logit_softcapping
        rope = rope["full_attention"]
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.scaling.kind == rope["rope_type"].replace("default", "none")
    assert ours.rope.scaling.factor == rope.get("factor", 1.0)
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == ([] if eos is None else eos if isinstance(eos, list) else [eos])
    assert ours.bos_token_id == theirs.bos_token_id


def test_generation_config_ends_come_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2, "bos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2], "pad_token_id": 0}))
    model = load_architecture(ModelSource("hf", tmp_path, "tiny"))
    assert (model.bos_token_id, model.eos_token_ids, model.pad_token_id) == (1, (9, 2), 0)


def test_quantization_is_kept() -> None:
    model = read(LLAMA, quantization_config={"quant_method": "gptq", "bits": 4})
    assert model.quantization == {"quant_method": "gptq", "bits": 4}


def test_unknown_architecture_lists_the_known_ones() -> None:
    known = r"\(known: llama, mistral, qwen2, qwen3, gemma3\)"
    with pytest.raises(
        UnsupportedModelError, match=rf"config.json: architecture 'rwkv7' is not supported {known}"
    ):
        read({"model_type": "rwkv7"})
    with pytest.raises(UnsupportedModelError, match="architecture 'BloomForCausalLM' is not supported"):
        read({"architectures": ["BloomForCausalLM"]})
    named = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert read(named, architectures=["LlamaForCausalLM"]).architecture == "llama"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "folder/config.json: key 'hidden_size' is missing"),
        ({"hidden_size": "64"}, "key 'hidden_size' is '64', not a number"),
        ({"hidden_size": 64.5}, "key 'hidden_size' is 64.5, not a whole number"),
        ({"num_hidden_layers": 0}, "key 'num_hidden_layers' is 0"),
        ({"num_hidden_layers": 10**9}, "key 'num_hidden_layers' is 1000000000, above the limit"),
        ({"num_hidden_layers": True}, "key 'num_hidden_layers' is True"),
        ({"vocab_size": -1}, "key 'vocab_size' is -1"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot be shared out among 3 KV heads"),
        ({"head_dim": 7}, "head dimension of 7 is odd"),
        ({"rms_norm_eps": float("nan")}, "key 'rms_norm_eps' is nan"),
        ({"rms_norm_eps": 0}, "key 'rms_norm_eps' is 0"),
        ({"rope_theta": float("inf")}, "key 'rope_theta' is inf"),
        ({"tie_word_embeddings": "yes"}, "key 'tie_word_embeddings' is 'yes', not true or false"),
        ({"hidden_act": 3}, "key 'hidden_act' is 3, not a string"),
        ({"eos_token_id": "</s>"}, "key 'eos_token_id' is '</s>', not a token id"),
        ({"eos_token_id": [1, None]}, "key 'eos_token_id'"),
        ({"rope_scaling": 4}, "key 'rope_scaling' is 4, not an object"),
        ({"rope_scaling": {"type": "linear"}}, "config.json: 'rope_scaling': key 'factor' is missing"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                }
            },
            "'high_freq_factor' is 1.0, which must be above low_freq_factor",
        ),
        ({"text_config": 3}, "key 'text_config' is 3, not an object"),
        ({"model_type": None}, "key 'model_type' is missing"),
        ({"model_type": 5}, "key 'model_type' is 5, not a string"),
    ],
)
def test_wrong_fields_name_file_and_key(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(LLAMA, **changes)
    assert expected in str(caught.value)


def test_every_wrong_type_is_a_checkpoint_error() -> None:
    """Any JSON value in any place: either it is fine or the error is typed."""
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0}
    full = LLAMA | {"rope_scaling": rope, "layer_types": ["full_attention"] * 3, "eos_token_id": 1}
    values = [
        None,
        True,
        -1,
        0,
        1,
        1.5,
        1e300,
        "",
        "x",
        [],
        [1],
        ["x"],
        [[]],
        {},
        {"a": 1},
        10**30,
        10**400,
        math.inf,
        -math.inf,
        math.nan,
        "default",
    ]
    num_refused = 0
    for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma3"):
        for key in [*full, "sliding_window", "use_sliding_window", "architectures", "text_config", "dtype"]:
            for value in values:
                try:
                    read(full | {"model_type": kind} | {key: value})
                except CheckpointError as error:
                    num_refused += 1
                    assert "config.json" in str(error)
        for key in rope:
            for value in values:
                try:
                    read(full | {"model_type": kind, "rope_scaling": rope | {key: value}})
                except CheckpointError:
                    num_refused += 1
    assert num_refused > 500


def test_config_files_that_are_not_objects(tmp_path: Path) -> None:
    source = ModelSource("hf", tmp_path, "tiny")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read: No such file"):
        load_architecture(source)
    for text in ("[1]", "{", "", '{"a": ' + "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config.json: is not"):
            load_architecture(source)

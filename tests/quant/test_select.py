"""Which method a module gets, from what the checkpoint has and what the user wants."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from headrace.checkpoint.gguf_types import GGMLType
from headrace.errors import UnsupportedModelError
from headrace.quant.awq import AWQMethod
from headrace.quant.compressed_tensors import CompressedTensorsMethod
from headrace.quant.gguf import GGUFMethod
from headrace.quant.gptq import GPTQMethod
from headrace.quant.precision import EMBEDDING_ROUNDING, Precision, Rounding
from headrace.quant.rounded import RoundedMethod
from headrace.quant.select import select_method
from headrace.quant.unquantized import UNQUANTIZED, DequantizedMethod
from tests.loader.test_ggml_affine import random_blocks
from tests.quant.packed_weights import BlockWeights, home, home_of

WORDS = {"m.qweight": torch.zeros(1, 1, dtype=torch.int32)}
GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}
GGUF = {"quant_method": "gguf"}
BLOCKS = BlockWeights(
    {"dense.weight": torch.zeros(4, 4)},
    {
        "m.weight": random_blocks(GGMLType.Q4_1, 4, 32),
        "other.weight": random_blocks(GGMLType.Q8_0, 4, 32),
        "rare.weight": random_blocks(GGMLType.Q3_K, 4, 256),
    },
)


def test_plain_checkpoints() -> None:
    assert select_method(home({}), "m") is UNQUANTIZED
    assert select_method(home({}, precision=Precision.parse("none")), "m") is UNQUANTIZED
    rounded = select_method(home({}, precision=Precision.parse("int4-g64")), "m")
    assert rounded == RoundedMethod(Rounding(4, 64), UNQUANTIZED)


def test_checkpoints_of_words() -> None:
    assert select_method(home(WORDS, GPTQ), "m") == GPTQMethod(4, None, 1)
    assert select_method(home(WORDS, AWQ), "m") == AWQMethod(None)
    for config in (GPTQ, AWQ):
        assert select_method(home(WORDS, config), "lm_head") is UNQUANTIZED


def test_compressed_tensors() -> None:
    weights = {"num_bits": 8, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    assert select_method(home({}, config), "m") == CompressedTensorsMethod(8, None, False, True)
    assert select_method(home({}, config), "lm_head") is UNQUANTIZED


def test_a_ggml_tensors_type_decides_for_itself_alone() -> None:
    where = home_of(BLOCKS, GGUF, is_fast=True)
    assert select_method(where, "m") == GGUFMethod(GGMLType.Q4_1)
    assert select_method(where, "other") == GGUFMethod(GGMLType.Q8_0)
    assert select_method(where, "dense") is UNQUANTIZED


def test_types_without_kernels_become_8_bits_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    where = home_of(BLOCKS, GGUF, is_fast=True)
    with caplog.at_level(logging.WARNING):
        method = select_method(where, "rare")
    assert method == RoundedMethod(EMBEDDING_ROUNDING)
    assert "no kernels for weights of type Q3_K" in caplog.text


def test_without_fast_kernels_blocks_are_decoded() -> None:
    assert select_method(home_of(BLOCKS, GGUF), "m") is UNQUANTIZED


def test_what_the_user_wants_comes_first() -> None:
    none, int8 = Precision.parse("none"), Precision.parse("int8")
    assert select_method(home_of(BLOCKS, GGUF, none, is_fast=True), "m") is UNQUANTIZED
    assert select_method(home_of(BLOCKS, GGUF, int8, is_fast=True), "m") == RoundedMethod(Rounding(8, None))
    stored = GPTQMethod(4, None, 1)
    assert select_method(home(WORDS, GPTQ, none), "m") == DequantizedMethod(stored)
    assert select_method(home(WORDS, GPTQ, int8), "m") == RoundedMethod(Rounding(8, None), stored)


@pytest.mark.parametrize("quantization", [{"quant_method": "bitsandbytes"}, {"bits": 4}])
def test_unknown_methods_are_refused_by_name(quantization: dict[str, Any]) -> None:
    name = repr(quantization.get("quant_method"))
    with pytest.raises(
        UnsupportedModelError, match=f"'a' are quantized with {name}.*known: gptq, awq, compressed"
    ):
        select_method(home({}, quantization), "a")


@pytest.mark.parametrize(
    ("wish", "is_fast", "expected"),
    [("auto", True, 16), ("auto", False, 32), ("int8", False, 8), ("int16", False, 16), ("float", True, 32)],
)
def test_inputs(wish: Any, is_fast: bool, expected: int) -> None:
    assert home({}, precision=Precision(inputs=wish), is_fast=is_fast).input_bits == expected

"""What is told of a model's forms before its matrices are read."""

from __future__ import annotations

import pytest
import torch

from headrace.quant.overview import kept_forms, second_rounding
from headrace.quant.precision import Precision, Rounding, parse_form
from tests.quant.packed_weights import home, home_of
from tests.quant.test_select import BLOCKS, GGUF, GPTQ, WORDS


def test_kept_forms() -> None:
    names = ["m", "other", "dense"]
    assert kept_forms(home_of(BLOCKS, GGUF, is_fast=True), names) == {"Q4_1": 1, "Q8_0": 1, "dense": 1}
    assert kept_forms(home_of(BLOCKS, GGUF), names) == {"dense": 3}  # no fast kernels
    rounding = Precision.parse("int4", "m=int8-g64")
    assert kept_forms(home_of(BLOCKS, GGUF, rounding, is_fast=True), names) == {
        "int4-g32-zp": 2,
        "int8-g64": 1,
    }
    assert kept_forms(home(WORDS, GPTQ), ["m", "lm_head"]) == {"GPTQ int4": 1, "dense": 1}
    assert kept_forms(home(WORDS, GPTQ, Precision.parse("none")), ["m"]) == {"dense": 1}


def test_a_second_rounding_is_told() -> None:
    int4 = Precision.parse("int4")
    warning = second_rounding(home_of(BLOCKS, GGUF, int4, is_fast=True), ["m", "dense"])
    assert (
        warning is not None and warning.startswith("1 of the model's matrices") and "in Q4_1, and" in warning
    )
    assert "make them int4-g32-zp" in warning and "leave quantization at 'auto'" in warning
    override = Precision.parse("auto", "other=int8")
    assert "Q8_0" in str(second_rounding(home_of(BLOCKS, GGUF, override), ["m", "other"]))
    assert "GPTQ int4" in str(second_rounding(home(WORDS, GPTQ, int4), ["m", "lm_head"]))


def test_nothing_is_told_of_one_rounding_or_none() -> None:
    names = ["m", "other", "rare"]
    assert second_rounding(home_of(BLOCKS, GGUF, is_fast=True), names) is None
    assert second_rounding(home_of(BLOCKS, GGUF, Precision.parse("none")), names) is None
    plain = home({"m.weight": torch.zeros(4, 4)}, precision=Precision.parse("int4"))
    assert second_rounding(plain, ["m"]) is None


@pytest.mark.parametrize("text", ["int8-channel", "int8-g32-zp", "int4-g64", "int4-channel-zp"])
def test_roundings_are_spelled_as_they_are_read(text: str) -> None:
    rounding = parse_form(text)
    assert isinstance(rounding, Rounding) and str(rounding) == text

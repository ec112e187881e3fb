"""How users say in which form weights are kept."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.quant.precision import EMBEDDING_ROUNDING, Form, Precision, Rounding, parse_form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("int8", Rounding(8, None)),
        ("int8-channel", Rounding(8, None)),
        ("int8-g64", Rounding(8, 64)),
        ("int8-g128-zp", Rounding(8, 128, True)),
        ("int4", Rounding(4, 32, True)),
        ("int4-g64", Rounding(4, 64)),
        ("int4-g128-zp", Rounding(4, 128, True)),
    ],
)
def test_forms(text: str, form: Form) -> None:
    assert parse_form(text) == form


@pytest.mark.parametrize("text", ["", "int2", "int4-g17", "int4-zp-g32", "INT8", "fp8"])
def test_unknown_forms_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"quantization {text!r} is not known; known: auto, none, int8, int4"
    ):
        parse_form(text)


def test_the_first_override_that_matches_counts() -> None:
    precision = Precision.parse("int8", "model.layers.0.*=none, *.down_proj=int4-g64, lm_head=auto")
    assert precision.form_of("model.layers.0.mlp.down_proj") == "none"
    assert precision.form_of("model.layers.1.mlp.down_proj") == Rounding(4, 64)
    assert precision.form_of("lm_head") == "auto"
    assert precision.form_of("model.layers.1.mlp.up_proj") == Rounding(8, None)


def test_tables_of_the_vocabulary_get_8_bits_where_others_get_4() -> None:
    precision = Precision.parse("int4")
    for name in ("model.embed_tokens", "lm_head"):
        assert precision.form_of(name) == EMBEDDING_ROUNDING
        assert Precision.parse("int4", f"{name}=int4-g64").form_of(name) == Rounding(4, 64)
        assert Precision.parse("int8").form_of(name) == Rounding(8, None)
        assert Precision.parse("none").form_of(name) == "none"


@pytest.mark.parametrize("overrides", ["lm_head", "=int8", "a=int8,b"])
def test_overrides_that_cannot_be_read(overrides: str) -> None:
    with pytest.raises(ConfigError, match="write pattern=form"):
        Precision.parse("auto", overrides)


def test_forms_of_overrides_are_checked() -> None:
    with pytest.raises(ConfigError, match="'int3' is not known"):
        Precision.parse("auto", "lm_head=int3")


def test_no_overrides() -> None:
    assert Precision.parse("auto", "").overrides == () == Precision.parse("auto", None).overrides


def test_an_override_that_matches_nothing_is_refused() -> None:
    precision = Precision.parse("auto", "lm_hed=int8")
    for name in ("model.layers.0.mlp.down_proj", "lm_head"):
        precision.form_of(name)
    with pytest.raises(ConfigError, match=r"names 'lm_hed', which no module of the model matches.*'lm_head'"):
        precision.check_overrides()
    precision = Precision.parse("auto", "lm_head=int8,*.down_proj=none")
    precision.form_of("model.layers.0.mlp.down_proj")
    precision.check_overrides()  # lm_head may be the table itself

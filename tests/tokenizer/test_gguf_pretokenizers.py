"""Each pre-tokenizer on one tricky line, with the pieces that the model's own rule gives."""

from __future__ import annotations

import pytest

from headrace.errors import UnsupportedModelError
from headrace.tokenizer.gguf_pretokenizers import build_pre_tokenizer, pre_tokenizer_spec
from headrace.tokenizer.token_bytes import byte_level_bytes
from tests.tokenizer.oracles import gpt2_words, split_digits
from tests.tokenizer.texts import TEXTS, random_texts

LINE = "I'LL don't  pay 12345€!\n\n x=foo_Bar"


def pieces(name: str, text: str) -> list[str]:
    cut = build_pre_tokenizer(pre_tokenizer_spec(name, "m.gguf")).pre_tokenize_str(text)
    return [byte_level_bytes(piece).decode() for piece, _ in cut]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "I|'|LL| don|'t| | pay| 12345|€!|\n\n| x|=|foo|_|Bar"),
        ("smollm", "I|'|LL| don|'t| | pay| |1|2|3|4|5|€!|\n\n| x|=|foo|_|Bar"),
        ("llama-bpe", "I|'LL| don|'t| | pay| |123|45|€!\n\n| x|=foo|_Bar"),
        ("qwen2", "I|'LL| don|'t| | pay| |1|2|3|4|5|€!\n\n| x|=foo|_Bar"),
        ("tekken", "I|'LL| don|'t| | pay| |1|2|3|4|5|€!\n\n| x|=foo|_Bar"),
        ("default", "I|'|LL| don|'|t| | pay| |123|45|€|!|\n\n| x|=|foo|_|Bar"),
        ("deepseek-llm", "I|'|LL| don|'|t| | pay| |1|2|3|4|5|€|!|\n|\n| x|=|foo|_|Bar"),
        ("deepseek-coder", "I|'|LL| don|'|t| | pay| |1|2|3|4|5|€|!|\n|\n| x|=|foo|_|Bar"),
    ],
)
def test_pieces(name: str, expected: str) -> None:
    assert pieces(name, LINE) == expected.split("|")


def test_tekken_parts_words_at_capitals() -> None:
    assert pieces("tekken", "camelCaseHTTPServer") == ["camel", "Case", "HTTPServer"]
    assert pieces("qwen2", "camelCaseHTTPServer") == ["camelCaseHTTPServer"]


def test_deepseek_parts_scripts() -> None:
    assert pieces("deepseek-llm", "ab漢字cd") == ["ab", "漢字", "cd"]


def test_gpt2_and_smollm_equal_the_scanners() -> None:
    for text in TEXTS + random_texts(800, seed=6):
        assert pieces("gpt-2", text) == gpt2_words(text), repr(text)
        expected = [word for piece in split_digits(text) for word in gpt2_words(piece)]
        assert pieces("smollm", text) == expected, repr(text)


@pytest.mark.parametrize(
    "name", ["default", "llama-bpe", "qwen2", "tekken", "deepseek-llm", "deepseek-coder", "falcon"]
)
def test_nothing_is_lost(name: str) -> None:
    for text in TEXTS + random_texts(300, seed=7):
        assert "".join(pieces(name, text)) == text


def test_unknown_names() -> None:
    with pytest.raises(UnsupportedModelError, match=r"m.gguf: the pre-tokenizer 'kimi-k2'"):
        pre_tokenizer_spec("kimi-k2", "m.gguf")

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers

from headrace.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.test_hf import byte_level_backend, save, sentencepiece_backend
from tests.tokenizer.texts import TEXTS, random_texts
from tests.tokenizer.vocabularies import byte_level, sentencepiece

LONG = [
    " " * 5000,
    "\n" * 5000,
    "hello" * 1000,
    "각" * 500,
    "\u1100\u1161\u11a8" * 500,
    "e\u0301" * 900,
    "日本 " * 400,
]


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_never_above_the_truth(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in TEXTS + LONG + random_texts(200, seed=9, longest=900):
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_holds_for_composing_vocabularies(from_metadata: Callable[[dict[str, Any]], Tokenizer]) -> None:
    for metadata in (byte_level("qwen2"), byte_level("gpt-2"), sentencepiece()):
        tokenizer = from_metadata(metadata)
        for text in TEXTS + LONG:
            assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.min_num_tokens("日本 " * 4000) > 0


def test_huge_prompts_are_seen_at_once(smollm2: Tokenizer) -> None:
    smollm2.min_num_tokens("")
    text = "word " * 2_000_000
    started = time.process_time()
    assert smollm2.min_num_tokens(text) > 50_000
    assert time.process_time() - started < 0.05


def test_nothing_is_promised_where_text_may_vanish(tmp_path: Path) -> None:
    backend = byte_level_backend()
    assert load_tokenizer(save(tmp_path, backend)).min_num_tokens("x" * 5000) > 0
    backend.normalizer = normalizers.Strip()
    assert load_tokenizer(save(tmp_path, backend)).min_num_tokens("x" * 5000) == 0
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
    assert load_tokenizer(save(tmp_path, backend)).min_num_tokens("x" * 5000) == 0
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<greedy>", rstrip=True)])
    assert load_tokenizer(save(tmp_path, backend)).min_num_tokens("x" * 5000) == 0
    assert load_tokenizer(save(tmp_path, sentencepiece_backend())).min_num_tokens("x" * 5000) > 0

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.gguf_file import GGUFFile
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.tokenizer import Tokenizer
from tests.tokenizer.oracles import BytePairOracle, SentencePieceOracle
from tests.tokenizer.texts import TEXTS, random_texts
from tests.tokenizer.vocabularies import byte_level, sentencepiece

Build = Callable[[dict[str, Any]], Tokenizer]


def smollm2_oracle(file: GGUFFile) -> BytePairOracle:
    tokens, types = list(file.metadata["tokenizer.ggml.tokens"]), file.metadata["tokenizer.ggml.token_type"]
    special = {token: index for index, token in enumerate(tokens) if types[index] == 3}
    return BytePairOracle(tokens, list(file.metadata["tokenizer.ggml.merges"]), special)


def gemma_oracle(file: GGUFFile) -> SentencePieceOracle:
    metadata = file.metadata
    return SentencePieceOracle(
        list(metadata["tokenizer.ggml.tokens"]),
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        bos=2,
        has_prefix=False,
    )


def test_smollm2_equals_the_oracle(smollm2: Tokenizer, smollm2_file: GGUFFile) -> None:
    oracle = smollm2_oracle(smollm2_file)
    for text in TEXTS + random_texts(1500, seed=1):
        assert smollm2.encode(text) == oracle.encode(text), repr(text)


def test_smollm2_splits_digits_before_anything_else(smollm2: Tokenizer) -> None:
    """The 'smollm' rule: numbers stand alone, so the space run before one is not shortened for it."""
    assert [smollm2.token_text(i) for i in smollm2.encode("in 2024\n\n  1")] == [
        "in",
        " ",
        *"2024",
        "\n\n  ",
        "1",
    ]


def test_smollm2_round_trips(smollm2: Tokenizer) -> None:
    for text in TEXTS + random_texts(500, seed=2):
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([1, 19556, 2]) == "Hello"
    assert smollm2.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"
    assert smollm2.chat_template is not None
    assert not smollm2.strips_first_space


def test_gemma_equals_the_oracle(gemma: Tokenizer, gemma_file: GGUFFile) -> None:
    oracle = gemma_oracle(gemma_file)
    for text in TEXTS + random_texts(700, seed=3):
        assert gemma.encode(text) == oracle.encode(text), repr(text)


def test_gemma_round_trips(gemma: Tokenizer) -> None:
    for text in TEXTS + random_texts(500, seed=4):
        ids = gemma.encode(text, add_special_tokens=False)
        assert gemma.decode(ids, skip_special_tokens=False) == text


def test_gemma_takes_runs_whole(gemma: Tokenizer) -> None:
    ids = gemma.encode("a   b\n\n\nc" + " " * 40 + "d")
    assert [gemma.token_text(i) for i in ids] == [
        "<bos>", "a", "   ", "b", "\n\n\n", "c", " " * 31, " " * 9, "d"
    ]  # fmt: skip
    assert gemma.chat_template is None
    assert (gemma.bos_token_id, gemma.eos_token_id) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_agrees_with_transformers_conversion(name: str, request: pytest.FixtureRequest) -> None:
    """Where that conversion is right: for SmolLM2 not on digits, for Gemma not on literal space marks."""
    transformers = pytest.importorskip("transformers")
    fixture = {"smollm2": "smollm2", "gemma3-270m": "gemma"}[name]
    ours: Tokenizer = request.getfixturevalue(fixture)
    path = Path(request.getfixturevalue(f"{fixture}_file").path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    num_compared = 0
    for text in TEXTS + random_texts(2000, seed=5):
        if fixture == "smollm2" and any(char.isnumeric() for char in text):
            continue
        num_compared += 1
        assert ours.encode(text) == theirs.encode(text), repr(text)
    assert num_compared > 50


def test_small_byte_level_vocabulary(from_metadata: Build) -> None:
    tokenizer = from_metadata(byte_level())
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hello w123é<mark><|end|>")] == [
        "hello", " w", "1", "2", "3", "é", "<mark>", "<|end|>"
    ]  # fmt: skip
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([0, 3, 1]) == "<mark>"
    merged = from_metadata(byte_level("gpt-2"))
    assert [merged.token_text(i) for i in merged.encode("123")] == ["123"]


def test_start_and_end_tokens(from_metadata: Build) -> None:
    plain = from_metadata(byte_level())
    assert plain.encode("") == []
    framed = from_metadata(byte_level(add_bos_token=True, add_eos_token=True))
    assert framed.encode("") == [0, 1]
    assert framed.encode("h")[::2] == [0, 1]
    assert framed.encode("h", add_special_tokens=False) == plain.encode("h")
    assert from_metadata(byte_level("llama-bpe")).encode("") == [0]
    assert from_metadata(byte_level("llama-bpe", add_bos_token=False)).encode("") == []
    assert from_metadata(sentencepiece()).encode("") == [1]
    assert from_metadata(sentencepiece(add_bos_token=False)).encode("") == []


def test_small_sentencepiece_vocabulary_equals_the_oracle(from_metadata: Build) -> None:
    texts = [
        "hello",
        " hello",
        "hello  world\n\nhello",
        "héllo 日本",
        "<s>hello</s>",
        "wo  rld",
        "\n\n",
        "hellohellow",
    ]
    for has_prefix in (True, False):
        metadata = sentencepiece(add_space_prefix=has_prefix)
        tokenizer = from_metadata(metadata)
        oracle = SentencePieceOracle(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            bos=1,
            has_prefix=has_prefix,
        )
        for text in texts:
            assert tokenizer.encode(text) == oracle.encode(text), (has_prefix, text)


def test_the_prefix_space_is_dropped_on_decoding(from_metadata: Build) -> None:
    prefixed = from_metadata(sentencepiece())
    assert prefixed.strips_first_space
    for text in ("hello", " hello", "hello w", "日本"):
        assert prefixed.decode(prefixed.encode(text)) == text
    bare = from_metadata(sentencepiece(add_space_prefix=False))
    assert bare.decode(bare.encode(" hello")) == " hello"


def test_chat_templates_come_along(from_metadata: Build) -> None:
    metadata = byte_level() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = from_metadata(metadata)
    assert tokenizer.chat_template == "plain"
    user = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(user) == "plain"
    assert tokenizer.apply_chat_template(user, tools=[{"type": "function"}]) == "with tools"


def test_unknown_kinds_are_named(from_metadata: Build) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"pre-tokenizer 'future-bpe' .* \(known: chatglm-bpe, codeshell"
    ):
        from_metadata(byte_level("future-bpe"))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer model 'bert' .* \(known: gpt2"):
        from_metadata(byte_level(model="bert"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokens": [1, 2]}, "'tokenizer.ggml.tokens' is missing or not a list of strings"),
        ({"tokens": []}, "'tokenizer.ggml.tokens' is missing"),
        ({"token_type": [1]}, "'tokenizer.ggml.token_type' does not have one number for each"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["nospace"]}, "'tokenizer.ggml.merges' has at 0 'nospace'"),
        ({"merges": ["zzz yyy"]}, "'tokenizer.ggml.merges'"),
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        ({"bos_token_id": 10**6}, "'tokenizer.ggml.bos_token_id' is 1000000, outside the vocabulary"),
        ({"eos_token_id": "x"}, "'tokenizer.ggml.eos_token_id' is 'x'"),
        ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is 1, not true or false"),
    ],
)
def test_wrong_byte_level_metadata_is_named(
    from_metadata: Build, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_metadata(byte_level(**changes))
    assert expected in str(caught.value)
    assert "t.gguf" in str(caught.value)


def test_wrong_sentencepiece_metadata_is_named(from_metadata: Build) -> None:
    with pytest.raises(CheckpointError, match=r"'tokenizer.ggml.scores' does not have one number"):
        from_metadata(sentencepiece(scores=None))
    metadata = sentencepiece()
    metadata["tokenizer.ggml.tokens"][5] = "<s>"
    with pytest.raises(CheckpointError, match=r"'tokenizer.ggml.tokens' has the token '<s>' twice"):
        from_metadata(metadata)


def test_loading_the_packaged_tokenizer_is_quick(smollm2_file: GGUFFile) -> None:
    """A fresh interpreter, imports included, with no cache to help."""
    program = (
        "import time; started = time.perf_counter()\n"
        "from headrace.checkpoint import ModelSource\n"
        "from headrace.tokenizer import load_tokenizer\n"
        "import pathlib, sys\n"
        "load_tokenizer(ModelSource('gguf', pathlib.Path(sys.argv[1]), 'x'))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules and 'jinja2' not in sys.modules\n"
        "print(time.process_time())"
    )
    env = os.environ | {"XDG_CACHE_HOME": "/nonexistent"}
    times_s = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program, str(smollm2_file.path)], capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, done.stderr
        times_s.append(float(done.stdout))
    assert min(times_s) < 0.5


def test_any_damage_to_the_vocabulary_is_a_checkpoint_error(from_metadata: Build) -> None:
    """Values of every type in every key, and strange tokens: never a crash of the library."""
    values: list[Any] = [-1, 0, 10**6, 1.5, True, "", "x", [], [1], [""], ["a b"], [0.5], ["x", "x"]]
    num_refused = 0
    for make in (byte_level, sentencepiece):
        for key in [
            *make(),
            "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.add_space_prefix",
            "tokenizer.chat_template",
        ]:
            for value in values:
                try:
                    tokenizer = from_metadata(make() | {key: value})
                except CheckpointError:
                    num_refused += 1
                else:
                    tokenizer.decode(tokenizer.encode("hello 123\n\n日本"))
    assert num_refused > 100
    for position, piece in [
        (0, ""),
        (0, "$A"),
        (1, "a:1"),
        (3, "\0"),
        (3, " "),
        (5, "<|end|>x"),
        (3, "日本 語"),
    ]:
        metadata = byte_level(add_bos_token=True, add_eos_token=True)
        metadata["tokenizer.ggml.tokens"][position] = piece
        tokenizer = from_metadata(metadata)
        ids = tokenizer.encode("a $A a:1 日本 語")
        assert ids[0] == 0 and ids[-1] == 1

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.tokenizer.texts import TEXTS
from tests.tokenizer.vocabularies import byte_level, sentencepiece

Build = Callable[[dict[str, Any]], Tokenizer]


@pytest.fixture(params=["byte-level", "sentencepiece", "sentencepiece-bare", "smollm2", "gemma"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param in ("smollm2", "gemma"):
        return request.getfixturevalue(request.param)  # type: ignore[no-any-return]
    build: Build = request.getfixturevalue("from_metadata")
    metadata = {
        "byte-level": byte_level(),
        "sentencepiece": sentencepiece(),
        "sentencepiece-bare": sentencepiece(add_space_prefix=False),
    }[request.param]
    return build(metadata)


def cut(ids: Sequence[int], noise: random.Random) -> list[list[int]]:
    chunks, at = [], 0
    while at < len(ids):
        size = noise.choice([1, 1, 1, 2, 3, 7])
        chunks.append(list(ids[at : at + size]))
        at += size
    return chunks


def random_ids(tokenizer: Tokenizer, noise: random.Random) -> list[int]:
    """Ids of any tokens, byte tokens and special ones often among them, some beyond the vocabulary."""
    if noise.random() < 0.4:
        ids = tokenizer.encode(noise.choice(TEXTS))
        return [token_id for token_id in ids if noise.random() < 0.9]
    small = min(tokenizer.vocab_size, 520)
    return [
        noise.randrange(small) if noise.random() < 0.6 else noise.randrange(tokenizer.vocab_size + 5)
        for _ in range(noise.randrange(0, 25))
    ]


def run(detokenizer: IncrementalDetokenizer, chunks: list[list[int]]) -> list[str]:
    return [detokenizer.append(chunk) for chunk in chunks] + [detokenizer.flush()]


def test_any_cut_gives_the_text_of_all_ids(tokenizer: Tokenizer) -> None:
    noise = random.Random(11)
    for _ in range(1200):
        ids, skip = random_ids(tokenizer, noise), noise.random() < 0.5
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        pieces = run(detokenizer, cut(ids, noise))
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) == expected == detokenizer.text
        assert "".join(detokenizer.token_texts) == expected
        assert len(detokenizer.token_texts) == len(ids) == detokenizer.num_tokens_used
        assert detokenizer.stop_reason is None


def test_decoding_equals_the_library_on_valid_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        for skip in (True, False):
            ids = tokenizer.encode(text)
            expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_byte_level_decoding_equals_the_library_on_any_ids(smollm2: Tokenizer) -> None:
    """Broken UTF-8 included: both put one U+FFFD for each maximal part of a character."""
    noise = random.Random(12)
    for _ in range(3000):
        ids = [noise.randrange(400) for _ in range(noise.randrange(12))]
        assert smollm2.decode(ids) == smollm2._backend.decode(ids)


def test_an_answer_goes_on_where_its_prompt_ends(tokenizer: Tokenizer) -> None:
    noise = random.Random(13)
    num_unfinished = 0
    for _ in range(1200):
        ids, skip = random_ids(tokenizer, noise), noise.random() < 0.5
        at = noise.randrange(len(ids) + 1)
        prompt, answer = ids[:at], ids[at:]
        detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
        text = "".join(run(detokenizer, cut(answer, noise)))
        # What the prompt's last, unfinished character is worth alone is not part of the prompt's text.
        table = tokenizer.byte_table(skip)
        raw = b"".join(table[token_id] for token_id in prompt)
        finished = raw.decode("utf-8", "ignore") if is_unfinished(raw) else raw.decode("utf-8", "replace")
        if is_unfinished(raw):
            num_unfinished += 1
            if not valid_but_for_the_end(raw):
                continue
        if tokenizer.strips_first_space:
            finished = finished.removeprefix(" ")
        if any(table[token_id] for token_id in answer):
            assert finished + text == tokenizer.decode(ids, skip_special_tokens=skip)
        else:
            assert text == ""
    assert num_unfinished > 5


def is_unfinished(raw: bytes) -> bool:
    """Whether more bytes could turn the end into a character."""
    return any(not ends_whole(raw[-size:]) for size in (1, 2, 3) if size <= len(raw) and raw[-size] >= 0xC0)


def ends_whole(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return True


def valid_but_for_the_end(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def test_never_half_a_character(smollm2: Tokenizer) -> None:
    text = "🎉 日本語 é 👩‍👩‍👧 " * 20
    detokenizer = IncrementalDetokenizer(smollm2)
    pieces = run(detokenizer, [[token_id] for token_id in smollm2.encode(text)])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert any(piece == "" for piece in pieces)


def test_bytes_that_never_become_a_character_show_at_the_end(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ok🎉")[:-1]
    detokenizer = IncrementalDetokenizer(smollm2)
    assert detokenizer.append(ids) == "ok"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.text == "ok\ufffd"


def test_a_prompt_ending_inside_a_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🎉")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(smollm2, [*ids[:1], 0, 0, 0, 0, 0])
    assert detokenizer.append(ids[1:]) == "🎉"
    silent = IncrementalDetokenizer(smollm2, ids[:1])
    assert silent.append([0]) + silent.flush() == ""


def test_first_space(from_metadata: Build) -> None:
    tokenizer = from_metadata(sentencepiece())
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).append(hello) == "hello"
    assert IncrementalDetokenizer(tokenizer, [1]).append(hello) == "hello"
    assert IncrementalDetokenizer(tokenizer, [1, *hello]).append(hello) == " hello"
    shown = IncrementalDetokenizer(tokenizer, [1], skip_special_tokens=False)
    assert shown.append(hello) == " hello"


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_stop_strings_end_the_text_the_same_however_it_is_cut(tokenizer: Tokenizer) -> None:
    noise = random.Random(14)
    num_stopped = 0
    for _ in range(1200):
        ids = random_ids(tokenizer, noise)
        text = tokenizer.decode(ids)
        stops = []
        for _ in range(noise.randrange(1, 4)):
            at = noise.randrange(max(len(text), 1))
            stops.append(text[at : at + noise.randrange(1, 9)] + ("☃" if noise.random() < 0.3 else ""))
        stops = [stop for stop in stops if stop] or ["x"]
        include = noise.random() < 0.5
        detokenizer = IncrementalDetokenizer(tokenizer, stop=stops, include_stop_str_in_output=include)
        pieces = run(detokenizer, cut(ids, noise))
        expected, reason = naive_stop(text, stops, include)
        assert "".join(pieces) == expected == detokenizer.text, (text, stops)
        assert detokenizer.stop_reason == reason
        assert detokenizer.is_stopped == (reason is not None)
        assert detokenizer.append([5]) == "" or reason is None
        num_stopped += reason is not None
    assert num_stopped > 200


def test_text_is_held_back_only_while_it_may_complete_a_stop(from_metadata: Build) -> None:
    tokenizer = from_metadata(byte_level())
    letters = {char: tokenizer.encode(char)[0] for char in "abcdx"}
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["abcd", "bx"])
    seen = [detokenizer.append([letters[char]]) for char in "xabcab"]
    assert seen == ["x", "", "", "", "abc", ""]
    assert detokenizer.append([letters["a"]]) == "ab"
    assert detokenizer.flush() == "a"
    assert detokenizer.text == "xabcaba"


def test_tokens_used_end_with_the_one_that_completes_the_stop(from_metadata: Build) -> None:
    tokenizer = from_metadata(byte_level())
    ids = tokenizer.encode("hello whello")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["o w"])
    assert detokenizer.append(ids) == "hell"
    assert detokenizer.stop_reason == "o w"
    assert detokenizer.num_tokens_used == 2
    assert detokenizer.flush() == ""


def test_stops_are_not_looked_for_among_the_first_min_tokens(from_metadata: Build) -> None:
    tokenizer = from_metadata(byte_level())
    ids = tokenizer.encode("abab")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["ab"], min_tokens=2)
    assert detokenizer.append(ids) == "ab"
    assert (detokenizer.stop_reason, detokenizer.num_tokens_used) == ("ab", 4)


def test_token_texts_and_bytes(smollm2: Tokenizer) -> None:
    party = smollm2.encode("🎉")
    assert b"".join(smollm2.token_bytes(token_id) for token_id in party) == "🎉".encode()
    assert smollm2.token_text(party[0]) == "\ufffd"
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_bytes(10**6) == smollm2.token_bytes(-1) == b""


def test_cost_per_token_does_not_grow(smollm2: Tokenizer) -> None:
    """5 µs a token at most, as many in the last thousand as in the first."""
    ids = (smollm2.encode("The wheel turns, 水車が回る。 ") * 4000)[:40_000]
    detokenizer = IncrementalDetokenizer(smollm2, stop=["never to be seen", "\n\n\n"])
    for token_id in ids[:2000]:
        detokenizer.append([token_id])
    costs = []
    for start in range(2000, 40_000, 2000):
        started = time.process_time()
        for token_id in ids[start : start + 2000]:
            detokenizer.append([token_id])
        costs.append((time.process_time() - started) / 2000)
    costs.sort()
    assert costs[len(costs) // 2] < 5e-6

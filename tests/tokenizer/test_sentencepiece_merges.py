from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tokenizer import sentencepiece_merges
from headrace.tokenizer.sentencepiece_merges import cached_merges, merges_from_scores

PIECES = ["<unk>", "a", "b", "ab", "aba", "ba", "c"]
SCORES = [0.0, -10.0, -11.0, -2.0, -3.0, -1.0, -12.0]
MERGEABLE = [False, True, True, True, True, True, True]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headrace" / "tokenizers"


def forbid_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("built anew")

    monkeypatch.setattr(sentencepiece_merges, "merges_from_scores", fail)


def test_every_way_to_join_a_piece_stands_in_order_of_score() -> None:
    flat = merges_from_scores(PIECES, SCORES, MERGEABLE)
    pairs = [(PIECES[left], PIECES[right]) for left, right in zip(flat[::2], flat[1::2], strict=True)]
    assert pairs == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]
    without = merges_from_scores(PIECES, SCORES, [piece != "ba" for piece in PIECES])
    assert [PIECES[index] for index in without] == ["a", "b", "ab", "a"]


def test_the_cache_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_merges(PIECES, SCORES, MERGEABLE)
    assert len(list(cache.iterdir())) == 1
    forbid_building(monkeypatch)
    assert cached_merges(PIECES, SCORES, MERGEABLE) == first
    with pytest.raises(AssertionError, match="built anew"):
        cached_merges(PIECES, [*SCORES[:-1], -13.0], MERGEABLE)
    with pytest.raises(AssertionError, match="built anew"):
        cached_merges([*PIECES[:-1], "d"], SCORES, MERGEABLE)
    with pytest.raises(AssertionError, match="built anew"):
        cached_merges(PIECES, SCORES, [True, *MERGEABLE[1:]])


def test_damaged_files_are_made_anew(cache: Path) -> None:
    first = cached_merges(PIECES, SCORES, MERGEABLE)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], whole[:30] + b"\xff" + whole[31:], b"x" + whole[1:]):
        path.write_bytes(damaged)
        assert cached_merges(PIECES, SCORES, MERGEABLE) == first
        assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_used_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached_merges(PIECES, SCORES, MERGEABLE) == merges_from_scores(PIECES, SCORES, MERGEABLE)

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "n": [0, 129, True, 2.0, None, "1"],
    "best_of": [0, 129, True, 2.0, "1"],
    "use_beam_search": ["yes", 1, None],
    "length_penalty": [101, NAN, "1", None],
    "early_stopping": [1, "always", None, []],
    "presence_penalty": [2.1, NAN, "0", None, True, 10**5000],
    "frequency_penalty": [-2.1, INF, [0]],
    "repetition_penalty": [0, 1e-300, 0.0099, 101, 1e300, INF],
    "temperature": [-1, 1e30, NAN, INF, None],
    "top_p": [0, 1.1, NAN],
    "top_k": [-2, 1.0, 1 << 40],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [1 << 63, -(1 << 63) - 1, 1.0, True, 10**5000],
    "stop": [5, [""], [b"x"], ("a",), {"a"}, {}, ["a"] * 65],
    "stop_token_ids": [5, "5", [5.0], [True], {5}, (5,), [-1], [1 << 31]],
    "include_stop_str_in_output": ["yes", 1, None],
    "ignore_eos": ["yes", 0, None],
    "max_tokens": [0, 3.0, True],
    "min_tokens": [-1, None, 1.0],
    "logprobs": [21, -2, True],
    "prompt_logprobs": [21, -2, "1"],
    "logprobs_from": [-1, None],
    "detokenize": ["", 1, None],
    "skip_special_tokens": [1, "no"],
    "spaces_between_special_tokens": [1, None],
    "bad_words": [5, "abc", [""], [5], ("a",)],
    "bad_word_ids": [5, "abc", [5], [[]], [["a"]], [[True]], [[5.0]], [[-1]], [(1, 2)], {}],
    "logit_bias": [
        [(9, 1)], {9.7: 1}, {True: 1}, {"x": 1}, {"-1": 1}, {"٣": 1}, {"9" * 5000: 1}, {-1: 1}, {9: 101},
        {9: NAN}, {9: None}, {9: True}, {None: 1}, dict.fromkeys(range(1025), 1),
    ],
    "allowed_token_ids": [5, "ab", [], {9}, [True], [-1], [None]],
    "structured_outputs": [5, "json", {"json": {}}, [], True],
}  # fmt: skip


def test_every_field_is_tried() -> None:
    assert set(WRONG) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_name_the_field(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(RequestError, match=name) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name and len(str(caught.value)) < 300, value


@pytest.mark.parametrize("name", WRONG)
def test_values_put_in_later_are_checked_on_the_copy(name: str) -> None:
    params = SamplingParams()
    setattr(params, name, WRONG[name][0])
    with pytest.raises(RequestError, match=name):
        params.clone()


def test_accepted_spellings() -> None:
    params = SamplingParams(
        stop="x",
        top_k=-1,
        temperature=0,
        repetition_penalty=0.01,
        logit_bias={"9": -100, 3: 1},
        bad_word_ids=[[1, 2]],
    )
    assert params.stop == ["x"] and params.top_k == 0 and params.logit_bias == {9: -100, 3: 1}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    decoded = msgspec.json.decode(json.dumps({"logit_bias": {"5": 2}}), type=SamplingParams)
    assert decoded.logit_bias == {5: 2}


def test_checking_costs_next_to_nothing() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, stop=["a"], max_tokens=100)
    best = min(_seconds_of(params.verify, 200) for _ in range(20))
    assert best < 50e-6, best


def _seconds_of(call: Any, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("repetition_penalty", 1.1),
        ("stop", ["x"]),
        ("logit_bias", {5: 1.0}),
    ],
)
def test_beam_search_refuses_what_it_would_not_honour(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is .* beam search") as refusal:
        SamplingParams(**{"use_beam_search": True, "temperature": 0.0, name: value})
    assert refusal.value.param == name


def test_best_of_is_not_below_n() -> None:
    with pytest.raises(RequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=3).num_sequences == 3 and SamplingParams(n=2, best_of=5).num_sequences == 5

from __future__ import annotations

import msgspec
import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError, RequestError
from headrace.names import unknown_name
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputsParams


def test_an_unknown_name_brings_the_nearest_and_never_a_long_list() -> None:
    assert (
        unknown_name("option", "blok", ["block", "other"]) == "unknown option 'blok'; did you mean 'block'?"
    )
    assert unknown_name("section", "zzz", ["cache", "model"]) == "unknown section 'zzz'; known: cache, model"
    many = unknown_name("option", "x" * 5000, [f"name_{i}" for i in range(60)])
    assert "the nearest are name_" in many and len(many) < 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_siz": 3}, "did you mean 'block_size'?"),
        ({"enforce_eager": True}, "'enforce_eager' has no counterpart here: max_graph_tokens 0"),
        ({"trust_remote_code": True}, "leave it out"),
        ({"qqqqq": 1}, "the nearest are"),
    ],
)
def test_options_of_another_engine(options: dict[str, object], words: str) -> None:
    for build in (EngineConfig.from_options, lambda **given: EngineConfig.from_sections({}, **given)):
        with pytest.raises(ConfigError) as caught:
            build(**options)
        assert words in str(caught.value) and len(str(caught.value)) < 200


def test_parameters_are_known_by_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'") as caught:
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    assert caught.value.param == "max_token"
    with pytest.raises(RequestError, match="did you mean 'regex'"):
        StructuredOutputsParams(regx="a")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="SamplingParams takes its values by name, as n=…"):
        SamplingParams(3)  # type: ignore[misc]
    params = SamplingParams(max_tokens=3)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params == params.clone()

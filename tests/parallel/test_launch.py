"""Reading one's place from a launcher's variables."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.parallel.launch import LaunchPlace

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_torchrun_and_bare_variables() -> None:
    assert LaunchPlace.read(TORCHRUN) == LaunchPlace(5, 8, 1, 4, "node0", 29500, True)
    bare = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert LaunchPlace.read(bare) == LaunchPlace(5, 8, 0, 1, "node0", 29500, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT are not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number; got 'two'"),
        ({"RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8"),
    ],
)
def test_mistakes_name_the_variable(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LaunchPlace.read(TORCHRUN | changes)


def test_the_number_of_processes_must_fit_the_sizes() -> None:
    place = LaunchPlace.read(TORCHRUN)
    place.check_size(8)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 8, .* is 4; start 4 processes"):
        place.check_size(4)

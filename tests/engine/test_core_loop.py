"""What a core does while it has nothing to do."""

from __future__ import annotations

from typing import Any

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.core_loop import CoreLoop
from headrace.engine.messages import AddRequest, CoreSpec, StopCore
from headrace.engine.null_core import NullCore
from headrace.sampling_params import SamplingParams


class Chores(NullCore):
    """Has some pieces to do, and notes all that is done."""

    def __init__(self, config: EngineConfig, num_pieces: int, notes: list[str]) -> None:
        super().__init__(config, [5])
        self.num_pieces, self.notes = num_pieces, notes

    def use_idle_time(self) -> bool:
        assert not self.has_work()
        self.num_pieces -= 1
        if self.num_pieces >= 0:
            self.notes.append("piece")
        return self.num_pieces >= 0

    def step(self) -> Any:
        self.notes.append("step")
        return super().step()


class Messages:
    """Gives what was set down for each look; after that, to stop."""

    def __init__(self, notes: list[str], at_look: dict[int, Any]) -> None:
        self.notes, self.at_look = notes, at_look
        self.num_looks = 0

    def get(self, block: bool) -> Any:
        self.num_looks += 1
        self.notes.append("wait" if block else "look")
        return StopCore() if self.num_looks > max(self.at_look) else self.at_look.get(self.num_looks)


def run(num_pieces: int, at_look: dict[int, Any]) -> list[str]:
    notes: list[str] = []
    core = Chores(EngineConfig(), num_pieces, notes)
    loop = CoreLoop(Messages(notes, at_look), lambda message: None)
    loop._load = lambda spec: core  # type: ignore[method-assign, assignment]
    assert loop.run(CoreSpec("unused:unused", EngineConfig(), {}))
    return notes


def request(num_tokens: int) -> AddRequest:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return AddRequest(EngineCoreRequest("one", [1, 2], params, num_tokens))


def test_pieces_are_done_one_after_another_before_it_waits() -> None:
    assert run(3, {5: None}) == ["piece", "look"] * 3 + ["wait", "step", "wait", "step", "wait"]


def test_a_request_comes_between_two_pieces() -> None:
    """And none is done while it runs."""
    notes = run(3, {2: request(2), 6: None})
    assert notes[:4] == ["piece", "look"] * 2
    assert notes[4:] == ["look", "step", "look", "step", "piece", "look", "wait", "step", "wait"]


def test_a_core_that_is_told_to_stop_stops_between_two_pieces() -> None:
    assert run(1000, {1: None}) == ["piece", "look"] * 2

"""When the sum over ranks takes the norm along. (The kernel itself: tests/kernels/test_triton_all_reduce.py.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.errors import ConfigError
from headrace.parallel import fused_reduce
from headrace.parallel.fused_reduce import FusedReduce, make_fused_reduce
from headrace.parallel.one_shot import OneShotCommunicator
from headrace.parallel.state import Communicator, SoloCommunicator
from tests.parallel.thread_group import ThreadCommunicator


class OneShot(OneShotCommunicator):
    """Symmetric memory of a single rank that agrees with itself."""

    def __init__(self) -> None:
        pass

    def all_agree(self, verdict: bool) -> bool:
        return verdict


@pytest.fixture(params=[True, False])
def is_right(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    class Checked:
        def __init__(self, *arguments: object) -> None:
            pass

        def is_right(self, plain: Communicator) -> bool:
            return bool(request.param)

        def shrink(self, plain: Communicator, time_ms: object) -> None:
            pass

    monkeypatch.setattr(fused_reduce, "FusedReduce", Checked)
    return bool(request.param)


def make(wanted: str, communicator: Communicator, width: int = 64) -> object:
    return make_fused_reduce(wanted, communicator, width, torch.bfloat16, 0)


def test_auto_takes_it_where_its_check_passes(is_right: bool) -> None:
    assert (make("auto", OneShot()) is not None) is is_right
    assert make("one-shot", OneShot()) is None and make("library", OneShot()) is None


def test_asked_for_by_name_it_is_there_or_refused(is_right: bool) -> None:
    if is_right:
        assert make("fused", OneShot()) is not None
    else:
        with pytest.raises(ConfigError, match=r"wrong on this machine.*'auto'"):
            make("fused", OneShot())


@pytest.mark.parametrize(
    ("communicator", "width", "reason"),
    [(ThreadCommunicator.__new__(ThreadCommunicator), 64, "memory"), (OneShot(), 60, "multiple of 8")],
)
def test_where_it_cannot_be_had(communicator: Communicator, width: int, reason: str) -> None:
    assert make("auto", communicator, width) is None
    with pytest.raises(ConfigError, match=reason):
        make("fused", communicator, width)


class Timed(OneShot):
    """Sums of nothing that note how many rows they are asked for, and the verdicts."""

    def __init__(self) -> None:
        self.verdicts: list[bool] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def all_agree(self, verdict: bool) -> bool:
        self.verdicts.append(verdict)
        return verdict


@pytest.mark.parametrize(("faster_up_to", "limit"), [(100, 64), (300, 256), (1 << 20, 1024)])
def test_it_takes_no_more_rows_than_it_is_faster_for(faster_up_to: int, limit: int) -> None:
    width, asked = 4096, []
    fused = FusedReduce.__new__(FusedReduce)
    fused._row_bytes, fused.max_rows = 2 * width, 1024
    fused._parts = torch.zeros((2, 1024, width), dtype=torch.bfloat16)

    def op(x: torch.Tensor, *_: object) -> None:
        asked.append(len(x))

    fused.op = op

    def time_ms(call: Callable[[], None]) -> float:
        count = len(asked)
        call()
        is_fused = len(asked) > count
        return (1.0 if asked[-1] <= faster_up_to else 3.0) if is_fused else 2.0

    ranks = Timed()
    fused.shrink(ranks, time_ms)
    assert fused.max_rows == limit
    assert asked == [128, 256, 512, 1024][: len(asked)] and len(ranks.verdicts) == len(asked)


def test_one_rank_has_nothing_to_add() -> None:
    assert make("auto", SoloCommunicator()) is None and make("fused", SoloCommunicator()) is None

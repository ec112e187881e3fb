"""What is sent is kept until it has arrived, and no longer, whether the library says so or has to be asked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from headrace.parallel.outbox import Outbox
from headrace.parallel.token_link import TokenLink


class Sending:
    """A send on its way."""

    def __init__(self, says_so: bool) -> None:
        self.says_so = says_so
        self.num_waits = 0

    def is_completed(self) -> bool:
        return self.says_so

    def wait(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("says_so", [True, False])
def test_nothing_piles_up(says_so: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Sending] = []

    def isend(tensor: torch.Tensor, target: int, group: object) -> Sending:
        sent.append(Sending(says_so))
        return sent[-1]

    monkeypatch.setattr(dist, "isend", isend)
    outbox = Outbox()
    for number in range(100):
        outbox.send(torch.tensor([number]), 1)
    assert len(outbox) == (1 if says_so else 16)
    assert [each.num_waits for each in sent] == ([0] * 100 if says_so else [1] * 84 + [0] * 16)


def test_tokens_go_to_every_rank_of_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[tuple[int, list[int], torch.dtype]] = []

    def isend(tensor: torch.Tensor, target: int, group: object) -> Sending:
        went.append((target, tensor.tolist(), tensor.dtype))
        return Sending(True)

    monkeypatch.setattr(dist, "isend", isend)
    link = TokenLink(None, 2, [0, 1], lambda: None, lambda: None)  # type: ignore[arg-type]
    link.send(torch.tensor([7, 9]))
    assert went == [(0, [7, 9], torch.int32), (1, [7, 9], torch.int32)]


def test_who_waits_for_tokens_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Receiving(Sending):
        def wait(self) -> None:
            told.append("waits")

    def irecv(buffer: torch.Tensor, source: int, group: object) -> Receiving:
        assert source == 2
        buffer.copy_(torch.tensor([4, 5, 6]))
        return Receiving(False)

    monkeypatch.setattr(dist, "irecv", irecv)
    link = TokenLink(None, 2, [0], lambda: told.append("enter"), lambda: told.append("leave"))  # type: ignore[arg-type]
    assert link.expect(3).wait().tolist() == [4, 5, 6]
    assert told == ["enter", "waits", "leave"]

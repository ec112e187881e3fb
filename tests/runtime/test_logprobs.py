"""Log-probabilities: values, ranks, per-row counts, the whole vocabulary, and parts of rows."""

from __future__ import annotations

import pytest
import torch

from headrace.runtime import row_parts as row_parts_module
from headrace.runtime.logprobs import compute_logprobs


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
@pytest.mark.parametrize("num_top", [[0, 0, 0], [0, 2, 20], [-1, 3, -1], [0, -1, 0]])
def test_entries(num_top: list[int], part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(row_parts_module._PART_BYTES, "cpu", part_bytes)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4)) * 4
    tokens = torch.tensor([7, 49, 0])
    entries = compute_logprobs(logits, tokens, num_top).to_host()
    exact = torch.log_softmax(logits.double(), -1)
    assert len(entries) == 3
    for row, (entry, count) in enumerate(zip(entries, num_top, strict=True)):
        order = exact[row].argsort(descending=True)[: 50 if count == -1 else count].tolist()
        assert entry.token_ids == [int(tokens[row]), *order]
        assert entry.logprobs == pytest.approx(exact[row][entry.token_ids].tolist(), abs=1e-5)
        assert entry.rank == 1 + int((exact[row] > exact[row][tokens[row]]).sum())


def test_shown_ties_do_not_depend_on_who_else_asks() -> None:
    logits = torch.zeros(2, 100)
    alone = compute_logprobs(logits[:1], torch.tensor([50]), [3]).to_host()[0]
    beside = compute_logprobs(logits, torch.tensor([50, 1]), [3, -1]).to_host()[0]
    assert alone.token_ids == beside.token_ids == [50, 0, 1, 2]
    assert alone.rank == 1 and alone.logprobs == beside.logprobs

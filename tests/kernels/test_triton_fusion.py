"""Which neighbours of a recorded forward become one, and that the result stays the same."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.arena import Arena
from headrace.kernels.op_plan import OpPlan, record
from headrace.kernels.registry import Ops
from headrace.kernels.triton.fusion import fuse
from tests.kernels.triton_setup import DEVICE, HALF, relative_error

WIDTH, INNER, EPS = 64, 48, 1e-5


@dataclass(eq=False)
class Step:
    num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[object, ...] = ()


def step(num_tokens: int) -> Step:
    ids = torch.arange(num_tokens, device=DEVICE)
    return Step(num_tokens, ids * 3 % 7, ids)


class Model:
    """Two layers of one linear where attention would stand, and a gated feed-forward block.

    reads_link: the last norm's input is read again at the end, so the ops around it cannot be fused.
    """

    def __init__(self, dtype: torch.dtype = HALF, *, reads_link: bool = False) -> None:
        self.ops = Ops.for_device("cpu", "reference")
        self.arena = Arena(DEVICE)
        self._reads_link = reads_link
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator) * columns**-0.5
            return values.to(DEVICE, dtype)

        self.table = weight(7, WIDTH) * 8
        self.layers = [
            (weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(2 * INNER, WIDTH), weight(WIDTH, INNER))
            for _ in range(2)
        ]
        self.halves = self.layers[0][2].chunk(2)
        self.norm = torch.rand(WIDTH, generator=generator).to(DEVICE) + 0.5
        names = {
            "residual": WIDTH,
            "normed": WIDTH,
            "qkv": WIDTH,
            "block": WIDTH,
            "gate_up": 2 * INNER,
            "act": INNER,
        }
        self._buffers = {name: self.arena.buffer(name, width, dtype) for name, width in names.items()}

    def forward(self, batch: Step) -> torch.Tensor:
        ops, norm = self.ops, self.norm
        buffers = {name: buffer.rows(batch.num_tokens) for name, buffer in self._buffers.items()}
        residual, normed, qkv, block, gate_up, act = buffers.values()
        ops.embedding(batch.input_ids, self.table, residual)
        for index, (first, output, gate, down) in enumerate(self.layers):
            if index == 0:
                ops.rms_norm(residual, norm, EPS, normed)
            else:
                ops.add_rms_norm(block, residual, norm, EPS, normed)
            ops.linear(normed, first, None, qkv)
            ops.linear(qkv, output, None, block)
            ops.add_rms_norm(block, residual, norm, EPS, normed)
            ops.linear(normed, gate, None, gate_up)
            ops.gated_act(gate_up, "silu", act)
            ops.linear(act, down, None, block)
        ops.add_rms_norm(block, residual, norm, EPS, normed)
        if self._reads_link:
            ops.rms_norm(block, norm, EPS, normed)
        return normed


def names(plan: OpPlan) -> list[str]:
    return [call.name for call in plan.calls]


LAYER_OF_ONE = ["norm_linear", "linear_add", "norm_gated_linear", "linear_add"]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_decoder_layer(dtype: torch.dtype) -> None:
    plan = record(Model(dtype), step(1))
    fused = fuse(plan, 1)
    assert names(fused) == ["embedding", *LAYER_OF_ONE, *LAYER_OF_ONE, "rms_norm"]
    expected = plan.replay(step(1)).clone()
    for buffer in fused.buffers:
        buffer.rows(1).fill_(torch.nan)
    assert relative_error(fused.replay(step(1)), expected) < 4e-3


@pytest.mark.parametrize("rows", [2, 8, 40])
def test_more_rows_are_left_alone(rows: int) -> None:
    """By being the same plan: then its graph is captured behind the first run."""
    plan = record(Model(), step(rows))
    assert fuse(plan, rows) is plan


def test_what_is_read_again_is_kept() -> None:
    fused = fuse(record(Model(reads_link=True), step(1)), 1)
    assert names(fused)[-3:] == ["linear", "add_rms_norm", "rms_norm"]
    assert names(fused)[1:5] == LAYER_OF_ONE


def test_parts_of_a_wider_buffer_are_not_links() -> None:
    class Parts(Model):
        def forward(self, batch: Step) -> torch.Tensor:
            gate_up, act, normed = (
                self._buffers[name].rows(batch.num_tokens) for name in ("gate_up", "act", "normed")
            )
            self.ops.embedding(batch.input_ids, self.table, normed)
            self.ops.linear(normed, self.halves[1], None, gate_up, INNER)
            self.ops.linear(normed, self.halves[0], None, gate_up)
            self.ops.gated_act(gate_up, "silu", act)
            return act

    assert names(fuse(record(Parts(), step(1)), 1)) == ["embedding", "linear", "linear", "gated_act"]


def test_no_tensors_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison with a symbol costs microseconds, and a plan has thousands of pairs: it is made between steps."""

    def fail(*_: object) -> bool:
        raise AssertionError("a tensor was compared")

    plan = record(Model(), step(1))
    monkeypatch.setattr(torch.Tensor, "__eq__", fail)
    monkeypatch.setattr(torch.Tensor, "__ne__", fail)
    assert len(fuse(plan, 1)) < len(plan)

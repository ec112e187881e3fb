"""A head and the search for each row's best token in one call: bitwise what both give one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from headrace.kernels.arena import Buffer
from headrace.kernels.native import sampling
from headrace.kernels.native.head_program import HeadProgram
from headrace.kernels.native.linear import pack_weight
from headrace.kernels.native.linear_packed import pack_matrix
from headrace.kernels.native.structs import OP_NUMBERS, LinearArgmaxArgs
from headrace.kernels.reference import sampling as reference
from headrace.kernels.registry import Ops
from tests.kernels.affine_matrices import KINDS, random_matrix

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")
NUM_INPUTS = 64
NUM_ROWS = (1, 2, 3, 16, 5, 33, 100, 256, 300, 4)
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@dataclass(frozen=True)
class Logits:
    """What a model's head gives."""

    padded: torch.Tensor
    slices: object = None


class Model:
    """A head of small whole numbers, so that many logits of a row are equal."""

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        cap: float | None = None,
        packed: bool = False,
        has_bias: bool = False,
    ) -> None:
        self.ops = Ops.for_device("cpu", "native")
        device = torch.device("cpu")
        self.head_buffers: Sequence[Buffer] = (
            Buffer("chosen", NUM_INPUTS, dtype, device),
            Buffer("logits", width, torch.float32, device),
        )
        generator = torch.Generator().manual_seed(width)
        self._cap = cap
        self._bias = torch.randint(-2, 3, (width,), generator=generator).to(dtype) if has_bias else None
        self._weight = pack_weight(torch.randint(-2, 3, (width, NUM_INPUTS), generator=generator).to(dtype))
        kind = KINDS[0]
        self._matrix = pack_matrix(random_matrix(kind, width, NUM_INPUTS)) if packed else None

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> Logits:
        chosen, logits = (buffer.rows(len(rows)) for buffer in self.head_buffers)
        self.ops.gather_rows(hidden, rows, chosen)
        if self._matrix is not None:
            self.ops.linear_packed(chosen, self._matrix, None, logits, 0, 16)
        else:
            self.ops.linear(chosen, self._weight, self._bias, logits, 0)
        if self._cap is not None:
            self.ops.soft_cap(logits, self._cap)
        return Logits(logits)


def inputs(num_rows: int, dtype: torch.dtype, is_finite: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of more tokens than are asked for, in another order."""
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randint(-2, 3, (num_rows + 3, NUM_INPUTS), generator=generator).to(dtype)
    hidden[11::13] = 0.0
    if not is_finite:
        hidden[3::13, 5], hidden[7::13, 5] = torch.nan, torch.inf
    return hidden, torch.randperm(num_rows + 3, generator=generator)[:num_rows]


def check(model: Model, dtype: torch.dtype, is_finite: bool = False) -> HeadProgram:
    program = HeadProgram.record(model, *inputs(5, dtype))
    assert program is not None
    for num_rows in NUM_ROWS:
        hidden, rows = inputs(num_rows, dtype, is_finite)
        logits = model.compute_logits(hidden, rows).padded.clone()
        values, tokens = program.run(hidden, rows)
        for expected_values, expected in (reference.row_argmax(logits), sampling.row_argmax(logits)):
            torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(tokens, expected)
    return program


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 16, 17, 31, 48, 130, 2051])
def test_both_in_one(width: int, dtype: torch.dtype) -> None:
    program = check(Model(width, dtype), dtype)
    assert [call.op for call in program._run.calls][1:] == [OP_NUMBERS[LinearArgmaxArgs]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"cap": 3.0}, {"packed": True}, {"has_bias": True}])
def test_what_else_a_head_may_be(options: dict[str, float | bool], dtype: torch.dtype) -> None:
    check(Model(100, dtype, **options), dtype, is_finite="packed" in options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_matter(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    check(Model(1000, torch.bfloat16), torch.bfloat16)


def test_the_first_of_equals_however_threads_share_the_panels() -> None:
    model = Model(4096, torch.bfloat16)
    program = HeadProgram.record(model, *inputs(5, torch.bfloat16))
    assert program is not None
    for num_rows in (3, 40):
        hidden, rows = torch.zeros(num_rows, NUM_INPUTS, dtype=torch.bfloat16), torch.arange(num_rows)
        for value in (0.0, torch.nan):
            hidden.fill_(value)
            for _ in range(10):
                assert program.run(hidden, rows)[1].tolist() == [0] * num_rows


def test_a_part_of_the_vocabulary_is_left_to_others() -> None:
    model = Model(32, torch.bfloat16)
    whole = model.compute_logits
    model.compute_logits = lambda hidden, rows: Logits(whole(hidden, rows).padded, "slices")  # type: ignore[method-assign]
    assert HeadProgram.record(model, *inputs(5, torch.bfloat16)) is None
    assert model.ops.linear is model.ops.table["linear"]


def test_a_head_with_other_ops_is_left_to_them() -> None:
    model = Model(32, torch.bfloat16)
    whole = model.compute_logits

    def reduced(hidden: torch.Tensor, rows: torch.Tensor) -> Logits:
        logits = whole(hidden, rows)
        model.ops.all_reduce(logits.padded)
        return logits

    model.compute_logits = reduced  # type: ignore[method-assign]
    assert HeadProgram.record(model, *inputs(5, torch.bfloat16)) is None

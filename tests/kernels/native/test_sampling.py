"""Native sampling functions against the reference's."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.native import sampling
from headrace.kernels.reference import sampling as reference

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 7, 100, 4096, 4097, 49152])
def test_row_argmax(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    for wanted in range(4):
        x = torch.randint(-9, 9, (rows, width + 3), generator=generator).float()[:, 1 : width + 1]
        if wanted == 1:
            x = torch.randn(rows, width, generator=generator)
        if wanted == 2:
            x[:, width // 2 :] = torch.nan
        if wanted == 3:
            x.fill_(-torch.inf)
        values, ids = sampling.row_argmax(x)
        plain_values, plain_ids = reference.row_argmax(x.contiguous()) if rows else (x[:, 0], x[:, 0].long())
        torch.testing.assert_close(values, plain_values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ids, plain_ids)


def test_all_that_samplers_use_is_there() -> None:
    own = {
        name
        for name, value in vars(reference).items()
        if getattr(value, "__module__", "") == reference.__name__
    }
    assert {name for name in own if not name.startswith("_")} == set(sampling.__all__)

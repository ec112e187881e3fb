"""Every quantized form cut over ranks, which are threads: the results of one rank, from each rank's share of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from headrace.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from headrace.parallel.state import ParallelState
from headrace.quant.packed import PackedLinear
from headrace.quant.precision import Precision
from tests.layers.dict_weights import DictWeights, context
from tests.parallel.thread_group import run_ranks
from tests.quant import test_awq, test_compressed_tensors, test_gptq
from tests.quant.packed_weights import FastReferenceOps

N, K, GROUP = test_gptq.N, test_gptq.K, 32
CHANNELS = ("int8", "int8-channel", "int4-channel")
"""One scale for a whole row: a rank that multiplies with a part of the row reads all of it."""


class Form(NamedTuple):
    """A stored matrix "m", what its checkpoint says of it, and what the user asks for."""

    tensors: dict[str, torch.Tensor]
    weights: torch.Tensor | None
    quantization: Mapping[str, Any] | None = None
    wanted: str = "auto"


def forms() -> dict[str, Form]:
    dense = {"m.weight": torch.randn(N, K, generator=torch.Generator().manual_seed(4))}
    gptq = {"quant_method": "gptq", "group_size": GROUP}
    awq = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    made = {
        "gptq-4": Form(*test_gptq.checkpoint(4, GROUP, None, 1), {**gptq, "bits": 4}),
        "gptq-8": Form(*test_gptq.checkpoint(8, GROUP, None, 1), {**gptq, "bits": 8}),
        "awq": Form(*test_awq.checkpoint(GROUP), awq),
    }
    for layout in ("pack-quantized", "int-quantized"):
        config = test_compressed_tensors.config(layout, 4, GROUP, False)
        stored = test_compressed_tensors.checkpoint(layout, 4, GROUP, False)
        made[layout] = Form(*stored, {"quant_method": "compressed-tensors", **config})
    return made | {
        wanted: Form(dense, None, wanted=wanted)
        for wanted in ("int4-g32", "int8-g32", "int4-g32-zp", *CHANNELS)
    }


def outputs(form: Form, parallel: ParallelState, is_row: bool, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What one rank's layer gives, and the bytes of the matrix that it has read."""
    source = DictWeights(form.tensors)
    ctx = context(source, parallel)
    ops = FastReferenceOps(ctx.ops.table)
    ctx = replace(
        ctx, ops=ops, quantization=form.quantization, precision=Precision.parse(form.wanted, [], "float")
    )
    layer: Linear
    if is_row:
        layer = RowParallelLinear(ctx, "m", K, N, has_bias=False)
        x = x[:, parallel.share(K, "columns")].contiguous()
    else:
        layer = ColumnParallelLinear(ctx, ["m"], K, [N], has_bias=False)
    assert all(isinstance(part, PackedLinear) for part, _ in layer._parts)
    out = torch.full((len(x), layer.num_outputs), torch.nan)
    layer(x, out)
    wide = ("m.weight", "m.qweight", "m.weight_packed")
    return out, sum(torch.Size(shape).numel() for name, shape in source.read if name in wide)


@pytest.mark.parametrize("name", forms())
@pytest.mark.parametrize(("is_row", "size"), [(True, 2), (True, 4), (False, 3)])
def test_ranks_cut_between_groups(name: str, is_row: bool, size: int) -> None:
    form, x = forms()[name], torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    whole, whole_read = outputs(form, ParallelState(), is_row, x)
    if form.weights is not None:
        torch.testing.assert_close(whole, x @ form.weights.T, rtol=1e-4, atol=1e-4)
    ranks = run_ranks(size, lambda parallel: outputs(form, parallel, is_row, x))
    found = [ranks[0][0]] if is_row else [torch.cat([out for out, _ in ranks], dim=1)]
    for out in found:
        torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-4)
    parts = 1 if is_row and name in CHANNELS else size
    assert all(num_read * parts == whole_read for _, num_read in ranks)

"""FusedReduce: the sum over ranks, the residual and the norm in one kernel, for the small steps that become graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from headrace.errors import ConfigError
from headrace.kernels.reference.norm import add_rms_norm
from headrace.kernels.registry import Op, load_kernels
from headrace.parallel.one_shot import OneShotCommunicator
from headrace.parallel.state import Communicator, SoloCommunicator
from headrace.platforms.cuda import graph_ms

logger = logging.getLogger(__name__)

MAX_BYTES = 8 << 20
"""Of what one call sums."""
_SURE_BYTES = 1 << 19
"""Up to here it was faster wherever it was measured; beyond, each machine is asked at the start."""
_EPS = 1e-5
_ALIGNED_ELEMENTS = 8
_LINE = 32
"""Numbers of a cache line."""


class FusedReduce:
    """Memory of the kernel ``all_reduce_add_norm`` for rows of one width.

    Args:
        one_shot: the ranks, and memory that all see.
        width, dtype: of the activations.
        rank: in the group.

    Attributes:
        op: as ``add_rms_norm``, of the sum over ranks.
        exchange: for decode stacks, which add up by themselves.
    """

    def __init__(self, one_shot: OneShotCommunicator, width: int, dtype: torch.dtype, rank: int) -> None:
        from headrace.kernels.triton.all_reduce import MAX_PROGRAMS, SharedRows, all_reduce_add_norm
        from headrace.kernels.triton.launch import num_multiprocessors
        from headrace.kernels.triton.rank_exchange import RankExchange, Ranks

        self._row_bytes = width * dtype.itemsize
        self.max_rows = MAX_BYTES // self._row_bytes
        self._parts, parts = one_shot.shared_memory((2, self.max_rows, width), dtype)
        self._flags, flags = one_shot.shared_memory((MAX_PROGRAMS, len(parts)), torch.int32)
        num_programs = one_shot.smallest(min(MAX_PROGRAMS, num_multiprocessors(parts.device)))
        shared = SharedRows(parts, flags, rank, self.max_rows, width, num_programs)
        self.op: Op = partial(all_reduce_add_norm, shared)
        ranks = Ranks(len(parts), rank)
        self._exchanged = [
            one_shot.shared_memory((2, ranks.size, width), dtype),
            one_shot.shared_memory((_LINE,), torch.int32),
        ]
        (_, parts), (_, arrivals) = self._exchanged
        num_programs = one_shot.smallest(num_multiprocessors(parts.device))
        self.exchange = RankExchange(ranks, parts, arrivals, num_programs, one_shot.all_agree)

    def shrink(self, plain: OneShotCommunicator, time_ms: Callable[[Callable[[], None]], float]) -> None:
        """Take no more rows than are faster so than by a sum and a norm; the same on all ranks.

        Args:
            plain: the sums of the other way.
            time_ms: of one call.
        """
        norm = load_kernels("norm", self._parts.device).add_rms_norm
        x, residual = self._parts.new_zeros((2, self.max_rows, self._parts.shape[2]))
        weight = torch.ones(x.shape[1], dtype=torch.float32, device=x.device)

        def apart(x: torch.Tensor, residual: torch.Tensor) -> None:
            plain.all_reduce(x)
            norm(x, residual, weight, _EPS, x)

        limit = num_rows = _SURE_BYTES // self._row_bytes
        while 2 * num_rows <= self.max_rows:
            num_rows *= 2
            rows = x[:num_rows], residual[:num_rows]
            fused_ms = time_ms(partial(self.op, *rows, weight, _EPS, rows[0]))
            apart_ms = time_ms(partial(apart, *rows))
            logger.info("sum and norm of %d rows: fused %.4f ms, apart %.4f ms", num_rows, fused_ms, apart_ms)
            if not plain.all_agree(fused_ms < apart_ms):
                break
            limit = num_rows
        self.max_rows = limit

    def is_right(self, plain: Communicator) -> bool:
        """Whether it gives what a plain sum and the reference norm give, a few times over."""
        like, most = self._parts[0], self.max_rows
        for turn, num_rows in enumerate((1, min(8, most), 1, most, min(8, most), most)):
            generator = torch.Generator(like.device).manual_seed(turn)
            draw = partial(
                torch.randn, like.shape[1], dtype=torch.float32, device=like.device, generator=generator
            )
            residual = torch.stack([draw() for _ in range(num_rows)]).to(like.dtype)
            generator.manual_seed(1000 * dist.get_rank() + turn)
            x = torch.stack([draw() for _ in range(num_rows)]).to(like.dtype)
            weight = torch.ones(like.shape[1], dtype=torch.float32, device=like.device)
            summed, total = x.clone(), residual.clone()
            plain.all_reduce(summed)
            expected = torch.empty_like(x)
            add_rms_norm(summed, total, weight, _EPS, expected)
            self.op(x, residual, weight, _EPS, x)
            if not torch.allclose(x.float(), expected.float(), atol=0.05, rtol=0.02):
                return False
        return True


def make_fused_reduce(
    wanted: str, communicator: Communicator, width: int, dtype: torch.dtype, rank: int
) -> FusedReduce | None:
    """Ready to use; None where it is not wanted, cannot be had, or does not give what it must.

    All ranks of the group call it together, and all get one or none does.

    Raises: ConfigError when "fused" is asked for and cannot be had.
    """
    if wanted not in ("auto", "fused") or isinstance(communicator, SoloCommunicator):
        return None
    if not isinstance(communicator, OneShotCommunicator):
        reason = "the ranks do not see each other's memory"
    elif width % _ALIGNED_ELEMENTS:
        reason = f"the hidden size {width} is not a multiple of {_ALIGNED_ELEMENTS}"
    else:
        fused = FusedReduce(communicator, width, dtype, rank)
        if communicator.all_agree(fused.is_right(communicator)):
            if wanted == "auto":
                fused.shrink(communicator, graph_ms)
            return fused
        reason = "the fused sum over ranks is wrong on this machine"
    if wanted == "fused":
        raise ConfigError(f"all_reduce='fused' cannot be had: {reason}; use 'auto' or 'library'")
    logger.info("sums over ranks and norms stay apart: %s", reason)
    return None

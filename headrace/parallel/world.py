"""World: the ranks that run one model together, and this process's place among them.

Ranks are numbered stage by stage: rank = stage * tensor_parallel_size + tensor rank. So tensor-parallel ranks, which
talk most, are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from headrace.config import ParallelConfig
from headrace.parallel.one_shot import choose_all_reduce
from headrace.parallel.pipeline import PipelineLink, PipelineStage
from headrace.parallel.rank_status import RankStatus
from headrace.parallel.state import Communicator, ParallelState, SoloCommunicator
from headrace.parallel.token_link import TokenLink
from headrace.parallel.torch_communicator import TorchCommunicator, WatchedCommunicator

_PATIENCE = timedelta(minutes=30)
_GRACE = timedelta(minutes=1)


@dataclass(frozen=True)
class World:
    """One process's place.

    Attributes:
        rank, size: among all ranks.
        local_rank, num_local_ranks: among those of this host, whose memory and cores they share.
        tensor: its tensor-parallel group.
        collectives: those of ``tensor``, not watched.
        stage: its part of the pipeline; ``link`` leads to the stages beside it, where there are any.
        tokens: from the last stage to the first, for the ranks that send or get them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1
    tensor: ParallelState = field(default_factory=ParallelState)
    stage: PipelineStage = field(default_factory=PipelineStage)
    link: PipelineLink | None = None
    tokens: TokenLink | None = None
    collectives: Communicator = field(default_factory=SoloCommunicator)

    @classmethod
    def join(
        cls,
        parallel: ParallelConfig,
        rank: int,
        *,
        store: Store,
        device: torch.device,
        local_rank: int,
        num_local_ranks: int,
        status: RankStatus,
    ) -> World:
        """Meet the other ranks. Blocks until all are there.

        Args:
            store: where they meet.
            device: where this rank computes; GPUs talk over NCCL, CPUs over gloo.
            status: told whenever this rank waits for others.
        """
        tensor_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        size = tensor_size * num_stages
        # The executor ends all when a rank hangs, and knows which: nobody's own waiting may end before that.
        patience = max(_PATIENCE, timedelta(seconds=parallel.rank_load_timeout_s)) + _GRACE
        store.set_timeout(patience)
        dist.init_process_group(
            _backend(device),
            store=PrefixStore("ranks", store),
            rank=rank,
            world_size=size,
            timeout=patience,
        )
        stage, tensor_rank = divmod(rank, tensor_size)
        inner: Communicator = SoloCommunicator()
        communicator = inner
        if tensor_size > 1:
            inner = _collectives(parallel, stage, device, num_local_ranks, patience)
            communicator = WatchedCommunicator(inner, status.enter_wait, status.leave_wait)
        link, tokens = None, None
        if num_stages > 1:
            tokens = _token_link(rank, tensor_size, size, status, patience)
            previous = rank - tensor_size if stage else None
            following = rank + tensor_size if stage + 1 < num_stages else None
            link = PipelineLink(previous, following, status.enter_wait, status.leave_wait)
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            num_local_ranks=num_local_ranks,
            tensor=ParallelState(tensor_rank, tensor_size, communicator, keeps_slices=parallel.pick_in_parts),
            stage=PipelineStage(stage, num_stages),
            link=link,
            tokens=tokens,
            collectives=inner,
        )

    @property
    def reports(self) -> bool:
        """Whether this rank's results are the step's: the first of the last stage."""
        return self.stage.is_last and self.tensor.rank == 0

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        if self.size == 1:
            return number
        everyone = torch.tensor([number], dtype=torch.int64, device="cpu")
        dist.all_reduce(everyone, dist.ReduceOp.MIN)
        return int(everyone)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _collectives(
    parallel: ParallelConfig, stage: int, device: torch.device, num_local_ranks: int, patience: timedelta
) -> Communicator:
    """Those of a stage's tensor-parallel group. Every rank makes the groups of all stages."""
    size = parallel.tensor_parallel_size
    groups = [
        dist.new_group(list(range(first, first + size)), backend=_backend(device), timeout=patience)
        for first in range(0, size * parallel.pipeline_parallel_size, size)
    ]
    plain = TorchCommunicator(groups[stage], size, device.type)
    if device.type != "cuda":
        return plain
    is_one_host = num_local_ranks % size == 0
    return choose_all_reduce(parallel.all_reduce, plain, groups[stage], device, is_one_host)


def _token_link(
    rank: int, tensor_size: int, size: int, status: RankStatus, patience: timedelta
) -> TokenLink | None:
    """From the last stage's first rank to all of the first stage; None for the ranks between. Every rank makes it."""
    first, source = list(range(tensor_size)), size - tensor_size
    group = dist.new_group([*first, source], backend="gloo", timeout=patience)
    if rank not in (*first, source):
        return None
    return TokenLink(group, source, first, status.enter_wait, status.leave_wait)


def describe_rank(rank: int, tensor_size: int, num_stages: int) -> str:
    """ "rank 3", and what it is where that is not plain."""
    if num_stages == 1:
        return f"rank {rank}"
    stage, tensor_rank = divmod(rank, tensor_size)
    return f"rank {rank} (stage {stage}" + (f", tensor rank {tensor_rank})" if tensor_size > 1 else ")")

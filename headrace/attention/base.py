"""AttentionBackend: turns a step's metadata into a plan. Running the plan is the ``attention`` op."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one rank's attention layers. num_heads is a multiple of num_kv_heads.

    is_coded: queries are bf16, keys and values codes of 8 bits.
    is_half: queries, keys and values are numbers of 16 bits.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_coded: bool = False
    is_half: bool = False


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The largest step that plans must fit, for backends that plan into fixed buffers (CUDA graphs).

    max_tokens: query tokens in one step.
    max_requests: requests in one step.
    max_context_tokens: the longest context.
    """

    max_tokens: int
    max_requests: int
    max_context_tokens: int


class AttentionBackend(Protocol):
    """The planner of one KV group, on the host.

    A backend is made once per KV group by ``create_backend`` and called once a step, before the forward. The plan it
    returns is run by the ``attention`` op of the same device, once a layer:

        attention(qkv [T, (H+2K)*D], k_cache [num_blocks, K, B, D], v_cache, plan, out [T, H*D],
                  num_heads, num_kv_heads, head_dim, scale, soft_cap)

    What every backend and its op promise:

    * ``out[t]`` is softmax(cap(scale * q.k)) over the keys that token t sees (see ``AttentionPlan``), summed in fp32
      whatever the storage types; K and V of the step's own tokens are already in the cache.
    * Slots of the cache that no row of an item sees are kept out of its results, whatever bytes they hold (NaN
      included). Block table entries of -1 are never read.
    * KV splits have a fixed length, so one row's result does not depend on the requests beside it. Where an
      implementation cannot keep that to the bit, its docstring says so.
    * With ``PlanLimits`` all tensors of all plans of this backend are the same memory, refilled by each ``plan``; a
      plan is then valid until the next one (or until the step that reads it is done, for asynchronous devices).
    """

    def __init__(self, shape: AttentionShape, device: torch.device, limits: PlanLimits | None = None) -> None:
        """
        Args:
            shape: heads of the layers of this group.
            device: where plans live and the op runs.
            limits: plan into fixed buffers for steps up to this size; None: exact-size tensors each step.
        """

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """The step's work list. Costs host time only (about 0.1 ms for 32 requests) and no synchronisation.

        Raises:
            CapacityError: the step exceeds the backend's ``PlanLimits``; nothing was planned.
        """


BACKENDS: dict[str, str] = {
    "reference": "headrace.attention.reference:ReferenceBackend",
    "native": "headrace.attention.native:NativeBackend",
    "triton": "headrace.attention.triton:TritonBackend",
}


def create_backend(
    name: str, shape: AttentionShape, device: torch.device, limits: PlanLimits | None = None
) -> AttentionBackend:
    """The backend called ``name``; its module is imported now, not before.

    Raises:
        ConfigError: no backend has that name; the message lists those that exist.
    """
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; choose one of: {', '.join(sorted(BACKENDS))}")
    module, _, cls = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), cls)(shape, device, limits)
    return backend

"""AttentionPlanners: the planners of one rank's layers, and the library that they may leave long prompt chunks to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from headrace.attention.base import AttentionBackend, AttentionShape, PlanLimits, create_backend
from headrace.checkpoint import ModelArchitecture
from headrace.errors import ConfigError
from headrace.kernels.quantized_cache import KVFormats
from headrace.platforms.cuda import compute_capability

if TYPE_CHECKING:
    from headrace.kernels.triton.library_attention import AttentionLibrary

_MAX_HEAD_DIM = 128
_LEAST_CAPABILITY = (8, 0)
_MEASURED_CAPABILITY = (9, 0)
_LEAST_CUDNN = 90000
_MAX_HELD_STEPS = 4
"""That a graph which was put off keeps the library from preparing, if no step asks for it again."""


class AttentionPlanners:
    """Makes planners, and keeps the library's preparing apart from graphs.

    Args:
        kernels: the kind that computes attention.
        shape: heads of one rank's layers; device: where they run.
        num_ranks: of the engine.
        library: for steps that run op by op; see ``make_attention_library``.
    """

    def __init__(
        self,
        kernels: str,
        shape: AttentionShape,
        device: torch.device,
        num_ranks: int = 1,
        library: AttentionLibrary | None = None,
    ) -> None:
        self._kernels, self._shape, self._device = kernels, shape, device
        self._num_ranks = num_ranks
        self._library = library
        self._num_held = 0

    @property
    def held_bytes(self) -> int:
        """Memory that the library holds all the time."""
        return 0 if self._library is None else self._library.held_bytes

    @property
    def transient_bytes(self) -> int:
        """Memory that it needs besides, at most, while it computes a layer."""
        return 0 if self._library is None else self._library.transient_bytes

    def make(self, limits: PlanLimits | None = None) -> AttentionBackend:
        """A planner for one KV group. With ``limits`` its plans are for graphs, which the library stays out of."""
        if self._library is not None and limits is None:
            from headrace.attention.library import LibraryBackend

            return LibraryBackend(self._shape, self._library)
        return create_backend(self._kernels, self._shape, self._device, limits)

    def after_step(self) -> None:
        """A step is queued on the device: the time to prepare the next of what plans missed of the library.

        Not while a graph waits to be captured: what was begun is finished, and then some steps pass with nothing being
        prepared, until one has asked again. So a graph waits for one plan's making, however many are wanted.
        """
        if self._library is None:
            return
        if self._num_held and self._library.thread.is_idle:
            self._num_held -= 1
        else:
            self._library.thread.prepare()

    def after_sizing(self) -> None:
        """The steps until now were none of a user's: nothing is prepared for them."""
        if self._library is not None:
            self._library.thread.forget()

    def close(self) -> None:
        """Let go of the library; no step follows."""
        if self._library is not None:
            self._library.thread.close()
            self._library = None

    def may_capture(self) -> bool:
        """Whether no other thread launches now; if not, what asks comes before the library's next plan.

        Ranks prepare at their own speed, but capture in the same step: they wait.
        """
        if self._library is None:
            return True
        if self._num_ranks > 1:
            self._library.thread.wait()
        is_idle = self._library.thread.is_idle
        self._num_held = 0 if is_idle else _MAX_HELD_STEPS
        return is_idle


def make_attention_library(
    setting: Literal["auto", "off", "cudnn"],
    arch: ModelArchitecture,
    shape: AttentionShape,
    *,
    kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | KVFormats,
    block_size: int,
    max_chunk: int,
    max_context: int,
) -> AttentionLibrary | None:
    """The library for one rank's layers; None: the engine's own kernels compute everything.

    Args:
        setting: ``attention_library``. "auto" takes it where it is known to be faster: compute capability 9 and up, and
            heads or blocks that ``hopper_tiles_kernel``, which is faster still, does not take.
        shape: heads of one rank's layers.
        kernels: the kind that computes attention ("triton").
        dtype, kv_dtype: of computing, and of what the cache holds.
        max_chunk: tokens of one request in a step, at most.
        max_context: tokens of a request, at most.

    Raises:
        ConfigError: it is asked for by name, and the machine or the model does not suit it.
    """
    if setting == "off":
        return None
    missing = why_not_device(kernels, device) or why_not_model(arch, dtype, kv_dtype)
    _refuse(setting, missing)
    if missing is not None or (setting == "auto" and not _is_faster(device, shape, block_size)):
        return None
    from headrace.attention.library import LibraryRule
    from headrace.kernels.triton.library_attention import AttentionLibrary

    rule = LibraryRule()
    if max_chunk < rule.min_rows:
        if setting == "cudnn":
            raise ConfigError(
                f"attention_library='cudnn' serves chunks of {rule.min_rows} tokens and more, but a step holds at most "
                f"{max_chunk} of a request; raise max_num_batched_tokens, max_prefill_chunk or max_model_len, or set "
                "attention_library to 'auto' or 'off'"
            )
        return None
    return AttentionLibrary(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        block_size,
        dtype,
        device,
        max_rows=rule.max_rows(max_chunk),
        max_piece=rule.max_piece,
        usual=rule.usual(max_chunk, max_context),
    )


def refuse_library(setting: Literal["auto", "off", "cudnn"], kernels: str, device: torch.device) -> None:
    """Raises ConfigError where the library is asked for by name and the machine does not suit it."""
    _refuse(setting, why_not_device(kernels, device))


def _refuse(setting: str, missing: str | None) -> None:
    if setting == "cudnn" and missing is not None:
        raise ConfigError(f"attention_library='cudnn' {missing}; set attention_library to 'auto' or 'off'")


def why_not_device(kernels: str, device: torch.device) -> str | None:
    """What the machine lacks, as the end of a sentence."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, but the device is {device.type!r}"
    if kernels != "triton":
        return f"works beside the Triton kernels, but kernels is {kernels!r}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return f"needs a torch that has attention by cuDNN, but torch {torch.__version__} has none"
    if not torch.backends.cudnn.is_available():
        return f"needs cuDNN, but torch {torch.__version__} finds none"
    version = torch.backends.cudnn.version() or 0
    if version < _LEAST_CUDNN:
        return f"needs cuDNN 9, but torch {torch.__version__} has version {version}"
    capability = compute_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0, but this GPU has {capability[0]}.{capability[1]}"
    return None


def why_not_model(
    arch: ModelArchitecture, dtype: torch.dtype, kv_dtype: torch.dtype | KVFormats
) -> str | None:
    """What in the model or its cache does not suit dense attention of 16-bit numbers, as the end of a sentence."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, but dtype is {_name(dtype)}"
    if not isinstance(kv_dtype, torch.dtype):
        return "needs a KV cache that is not quantized (kv_cache_dtype 'auto')"
    if kv_dtype != dtype:
        return f"needs a KV cache of its own type, but dtype is {_name(dtype)} and kv_cache_dtype {_name(kv_dtype)}"
    if arch.head_dim > _MAX_HEAD_DIM or arch.head_dim % 8:
        return (
            f"needs heads of at most {_MAX_HEAD_DIM} numbers, a multiple of 8, but they have {arch.head_dim}"
        )
    if arch.attn_logit_softcap is not None:
        return "does not cap scores, as this model does"
    if all(window is not None for window in arch.layer_windows):
        return "does not serve attention windows, and every layer of this model has one"
    return None


def _is_faster(device: torch.device, shape: AttentionShape, block_size: int) -> bool:
    """Whether the library is known to be faster than the kernels that would take its place."""
    from headrace.kernels.triton.attention_hopper_tiles import suits_hopper

    is_measured = compute_capability(device) >= _MEASURED_CAPABILITY
    return is_measured and not suits_hopper(shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

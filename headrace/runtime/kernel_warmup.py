"""KernelWarmup: Triton kernels compiled in threads while the weights are read.

Compiled kernels stay on disk in Triton's own cache (``~/.triton/cache``), whose keys hold Triton's version, the
device's architecture and the kernel's source; with all of them there a start compiles nothing.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

import torch

from headrace.checkpoint import ModelArchitecture
from headrace.kernels.quantized_cache import KVFormats
from headrace.kernels.triton.attention_hopper_tiles import held_back
from headrace.kernels.triton.launch import launch_options
from headrace.kernels.triton.model_widths import LayerForms, ModelWidths, PackedForm
from headrace.kernels.triton.rank_exchange import RankExchange
from headrace.kernels.triton.warmup import WarmupReport, decode_calls, first_token_calls, warm_up
from headrace.platforms.cuda import use_gpu
from headrace.quant.precision import Precision, Rounding
from headrace.runtime.short_turns import short_turns

logger = logging.getLogger(__name__)

_LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class KernelWarmup:
    """Begins at once: what a prompt needs up to its first token, then what decoding needs.

    A kernel that does not compile here is left to the step that needs it, where the failure can be seen in its place.

    Args:
        widths: of one rank's model.
        device: where the kernels run.
        num_threads: that compile at a time.
        exchange: with the other ranks, if it is one of several.
    """

    def __init__(
        self,
        widths: ModelWidths,
        device: torch.device,
        num_threads: int = 8,
        exchange: RankExchange | None = None,
    ) -> None:
        self.first_token = WarmupReport()
        self.decode = WarmupReport()
        self._widths, self._device, self._num_threads = widths, device, num_threads
        self._exchange = exchange
        self._is_first_done = threading.Event()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-warmup", daemon=True)
        self._thread.start()

    def wait_first_token(self) -> None:
        """Until the kernels of a prompt are compiled."""
        self._is_first_done.wait()

    @property
    def is_done(self) -> bool:
        """Whether nothing is compiled any more. Graphs are captured after that: until then other threads launch."""
        return self._is_done.is_set()

    def wait(self) -> None:
        """Until nothing is compiled any more."""
        self._is_done.wait()

    def _run(self) -> None:
        try:
            with short_turns(), held_back():
                self._compile()
        except Exception:
            logger.warning("warming up kernels failed; steps will compile theirs", exc_info=True)
        finally:
            self._is_first_done.set()
            self._is_done.set()

    def _compile(self) -> None:
        launch_options()  # Triton's driver is made by one thread, before many use it
        begin = partial(use_gpu, self._device) if self._device.type == "cuda" else None
        first = first_token_calls(self._widths, self._device)
        self.first_token = warm_up(first, self._num_threads, begin)
        self._is_first_done.set()
        decode = decode_calls(self._widths, self._device, self._exchange)
        self.decode = warm_up(decode, self._num_threads, begin)


def widths_of(
    arch: ModelArchitecture,
    *,
    num_heads: int,
    num_kv_heads: int,
    tensor_parallel_size: int,
    block_size: int,
    dtype: torch.dtype,
    is_whole: bool,
    kv_dtype: torch.dtype | KVFormats,
    num_slices: int = 1,
    precision: Precision | None = None,
    layers: range | None = None,
) -> ModelWidths:
    """What the kernels of one rank's part of a model depend on.

    Args:
        is_whole: the rank has all layers, or its part of each and a way to add up with the others.
        kv_dtype: of stored keys and values, or their formats.
        num_slices: parts of the vocabulary that tokens are picked from.
        precision: what the user asked weights to be rounded to; of packed weights in files nothing is known yet.
        layers: of the rank's stage; None: all.
    """
    precision = precision or Precision()
    head = "model.embed_tokens" if arch.tie_word_embeddings else "lm_head"
    return ModelWidths(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size // tensor_parallel_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=arch.head_dim,
        vocab_size=-(-arch.vocab_size // tensor_parallel_size),
        block_size=block_size,
        dtype=dtype,
        has_qk_norm=arch.qk_norm,
        windows=tuple(dict.fromkeys(arch.layer_windows)),
        soft_cap=arch.attn_logit_softcap,
        activation="silu" if arch.hidden_act in ("silu", "swish") else "gelu_tanh",
        has_qkv_bias=arch.attention_bias,
        kv_type=kv_dtype,
        num_layers=arch.num_layers if is_whole else 0,
        num_slices=num_slices,
        layer_forms=_layer_forms(precision, range(arch.num_layers) if layers is None else layers),
        embedding_form=_packed_form(precision, "model.embed_tokens"),
        head_form=_packed_form(precision, head),
    )


def _layer_forms(precision: Precision, layers: range) -> tuple[LayerForms, ...]:
    """Each once: overrides may give layers, and modules of one layer, forms of their own."""
    return tuple(
        dict.fromkeys(
            LayerForms(
                **{
                    name: _packed_form(precision, f"model.layers.{layer}.{block}.{name}")
                    for block, names in _LINEARS.items()
                    for name in names
                }
            )
            for layer in layers
        )
    )


def _packed_form(precision: Precision, module: str) -> PackedForm | None:
    form = precision.form_of(module)
    if not isinstance(form, Rounding):
        return None
    return PackedForm(form.bits, form.group_columns, form.has_zero_points)

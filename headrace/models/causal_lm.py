"""CausalLM: what all decoder-only models share. A model file describes its layer; this runs the stack."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.checkpoint.model_config import ModelArchitecture, RopeScaling
from headrace.kernels.arena import Buffer
from headrace.layers.attention import LayerCaches
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding, share_vocabulary
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import rotary_table
from headrace.layers.sliced_logits import SlicedLogits
from headrace.loader.tensor_names import EMBEDDING, HEAD

logger = logging.getLogger(__name__)


class DecoderLayer(Protocol):
    """One layer of a model."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """Advance ``residual`` [T, E] by this layer but for its last addend, which is left in ``hidden`` [T, E].

        On entry the residual stream is ``residual + hidden`` (for the first layer ``residual`` alone); layers add
        lazily so that adding and norming are one op.
        """

    def bind(self, caches: LayerCaches) -> None:
        """Use this KV cache from now on."""


class CausalLM:
    """Embedding, layers, final norm, head. Subclasses say in ``make_layer`` what a layer is.

    ``num_heads`` and ``num_kv_heads`` are this rank's. Constructing reads the weights. ``forward`` and
    ``compute_logits`` call registered ops only, over buffers of ``arena``, so that a forward can be recorded
    (``kernels/op_plan.py``).
    """

    def __init__(self, arch: ModelArchitecture, ctx: LayerContext) -> None:
        longest = ctx.max_model_len or arch.max_context_tokens
        ctx = replace(ctx, quantization=arch.quantization, max_model_len=longest)
        self.arch = arch
        self.ops = ctx.ops
        self.num_heads = _length(ctx.parallel.share(arch.num_attention_heads, "attention heads"))
        self.num_kv_heads = _length(ctx.parallel.kv_share(arch.num_kv_heads))
        self.arena = ctx.arena
        self._ctx = ctx
        self._tables: dict[float, torch.Tensor] = {}
        is_tied = ctx.stage.is_last and arch.tie_word_embeddings and not has_head_of_its_own(ctx)
        embedding: VocabParallelEmbedding | None = None
        if ctx.stage.is_first or is_tied:
            embedding = VocabParallelEmbedding(
                ctx, "model.embed_tokens", arch.vocab_size, arch.hidden_size, arch.embedding_scale
            )
        self._embedding = embedding if ctx.stage.is_first else None
        layer_ids = ctx.stage.layers(arch.num_layers)
        self.layers = [self.make_layer(arch, ctx, layer_id) for layer_id in layer_ids]
        self._norm: RMSNorm | None = None
        if ctx.stage.is_last:
            self._norm = RMSNorm(ctx, "model.norm", arch.hidden_size, arch.rms_norm_eps)
            tied = embedding if is_tied else None
            self._head = ParallelLMHead(
                ctx, "lm_head", arch.vocab_size, arch.hidden_size, tied, arch.final_logit_softcap
            )
        self._hidden = ctx.arena.buffer("hidden", arch.hidden_size, ctx.dtype)
        self._residual = ctx.arena.buffer("residual", arch.hidden_size, ctx.dtype)

    def make_layer(self, arch: ModelArchitecture, ctx: LayerContext, layer_id: int) -> DecoderLayer:
        """Build layer ``layer_id`` from its weights."""
        raise NotImplementedError

    def rotary_table(self, layer_id: int) -> torch.Tensor:
        """The layer's cosines and sines; sliding layers may have a base of their own (Gemma 3), unscaled."""
        arch = self.arch
        is_local = arch.local_rope_theta is not None and arch.layer_windows[layer_id] is not None
        theta = arch.local_rope_theta if is_local and arch.local_rope_theta else arch.rope.theta
        scaling = RopeScaling() if is_local else arch.rope.scaling
        key = -theta if is_local else theta
        if key not in self._tables:
            self._tables[key] = rotary_table(self._ctx, theta, arch.head_dim, scaling)
        return self._tables[key]

    def bind_kv_cache(self, caches: LayerCaches) -> None:
        """Use this KV cache from now on."""
        for layer in self.layers:
            layer.bind(caches)

    def reserve(self, num_tokens: int, num_logits_rows: int) -> None:
        """Make room for the largest step; buffers do not move any more as long as no larger one comes."""
        self.arena.reserve(num_tokens)
        if self._norm is not None:
            self._head.reserve(num_logits_rows)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E] of every token, after the final norm; valid until the next forward.

        A stage of a pipeline starts from what is in ``stage_buffers`` and leaves there what the next one needs.
        """
        hidden, residual = self.stage_buffers(batch.num_tokens)
        if self._embedding is not None:
            self._embedding(batch.input_ids, residual)
        for layer in self.layers:
            layer.forward(hidden, residual, batch)
        if self._norm is not None:
            self._norm.add(hidden, residual, hidden)
        return hidden

    def stage_buffers(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual), each [T, E], which together are the residual stream between two stages."""
        return self._hidden.rows(num_tokens), self._residual.rows(num_tokens)

    @property
    def head_buffers(self) -> tuple[Buffer, Buffer]:
        """What ``compute_logits`` writes; on the last stage only."""
        return self._head.buffers

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """Logits of the hidden states [T, E] at ``rows`` [R] int64; valid until the next call."""
        return self._head(hidden, rows)


def has_head_of_its_own(ctx: LayerContext) -> bool:
    """A checkpoint that says its embeddings are tied but brings another head: the head counts, as in transformers."""
    if not ctx.weights.has(HEAD):
        return False
    rows = share_vocabulary(ctx.parallel, ctx.weights.shape(EMBEDDING)[0])
    head, embedding = (ctx.weights.get(name, (rows,)).dequantize(ctx.dtype) for name in (HEAD, EMBEDDING))
    differs = not torch.equal(head, embedding)
    if differs:
        logger.warning("%s differs from the embedding, although the config ties them; the head is used", HEAD)
    return differs


def _length(part: slice) -> int:
    return int(part.stop - part.start)

"""Qwen3: Llama's layer with an RMSNorm on each query and key head (``arch.qk_norm``)."""

from __future__ import annotations

from headrace.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The architecture record carries all that differs."""

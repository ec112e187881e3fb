"""Mistral: Llama's layer with a sliding window (``arch.layer_windows``)."""

from __future__ import annotations

from headrace.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """The architecture record carries all that differs."""

"""Qwen2 and Qwen2.5: Llama's layer with biases on q, k, v (``arch.attention_bias``), later layers possibly sliding."""

from __future__ import annotations

from headrace.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The architecture record carries all that differs."""

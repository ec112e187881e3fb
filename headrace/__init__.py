"""Headrace: an LLM inference and serving engine. Public names load lazily, so importing it costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "headrace.engine.llm",
    "AsyncLLM": "headrace.engine.async_llm",
    "SamplingParams": "headrace.sampling_params",
    "StructuredOutputsParams": "headrace.structured_outputs",
    "RequestOutput": "headrace.outputs",
    "CompletionOutput": "headrace.outputs",
    "Logprob": "headrace.outputs",
    "HeadraceError": "headrace.errors",
}
__all__ = [
    "AsyncLLM",
    "CompletionOutput",
    "HeadraceError",
    "LLM",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.llm import LLM
    from headrace.errors import HeadraceError
    from headrace.outputs import CompletionOutput, Logprob, RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.structured_outputs import StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)

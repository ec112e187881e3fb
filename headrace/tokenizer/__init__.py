"""Text to token ids and back, chat templates, and text from token streams. No torch.

Public names load on first use, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.tokenizer.base import Tokenizer
    from headrace.tokenizer.detokenizer import IncrementalDetokenizer
    from headrace.tokenizer.load import load_tokenizer

_HOMES = {"IncrementalDetokenizer": "detokenizer", "Tokenizer": "base", "load_tokenizer": "load"}

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

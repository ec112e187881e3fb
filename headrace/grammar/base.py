"""What a grammar library must offer, and where each is found. Libraries are imported only in a backend's own file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.errors import GrammarError
from headrace.structured_outputs import Constraint

BACKEND_CLASSES = {
    "llguidance": "headrace.grammar.llguidance_backend:LLGuidanceBackend",
    "xgrammar": "headrace.grammar.xgrammar_backend:XGrammarBackend",
}


@dataclass(frozen=True)
class TokenVocabulary:
    """A model's tokens, as grammars see them.

    tokens: [V], each token's bytes; V is the width of the model's logits, and ids without a token have none.
    special_ids: tokens that stand for no text: no constraint ever allows them.
    end_ids: tokens that end an answer.
    encode: text to ids, no special tokens added.
    """

    tokens: list[bytes]
    special_ids: frozenset[int]
    end_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @property
    def num_mask_words(self) -> int:
        """uint32 words in one mask."""
        return -(-len(self.tokens) // 32)


class GrammarMatcher(Protocol):
    """One answer's place in its grammar. Advances from committed tokens only, in one place (the engine core).

    Methods of one matcher are called by one thread at a time.
    """

    def fill_mask(self, bitmask: np.ndarray, row: int) -> None:
        """Write the tokens allowed next into ``bitmask[row]`` (uint32 words; bit i of word w is token 32 * w + i).
        The tokens that end an answer are among them where the text may end.

        Raises: GrammarError when the grammar is too complex at this place.
        """

    def accept(self, token_ids: list[int]) -> bool:
        """Advance over committed tokens; False if one of them is not allowed (the matcher is of no use then).

        Raises: GrammarError when the grammar is too complex at this place.
        """

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, possibly none, spelled as the tokenizer spells their text."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def is_finished(self) -> bool:
        """True if the text may end here."""

    def is_complete(self) -> bool:
        """True if the text may end here and nothing can follow."""

    def copy(self) -> GrammarMatcher:
        """Another matcher at the same place, independent of this one."""


@dataclass(frozen=True)
class CompiledGrammar:
    """A constraint ready for use; shared by all answers that ask for it.

    matcher: at the beginning; never advanced, only copied.
    first_mask: [W] uint32, the tokens that may come first.
    """

    matcher: GrammarMatcher
    first_mask: np.ndarray


class GrammarBackend(Protocol):
    """One grammar library over one vocabulary. Safe to use from several threads."""

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a constraint. Raises GrammarError naming what cannot be done, and where."""


def load_backend(name: str, vocabulary: TokenVocabulary) -> GrammarBackend:
    """The backend of that name.

    Raises: GrammarError when its library is not installed.
    """
    module, _, class_name = BACKEND_CLASSES[name].partition(":")
    try:
        backend: Any = getattr(importlib.import_module(module), class_name)(vocabulary)
    except ImportError as error:
        raise GrammarError(
            f"the grammar backend {name!r} is not installed here ({error}): leave `backend` out, or install {name}",
            param="structured_outputs.backend",
            code="backend_not_installed",
        ) from None
    found: GrammarBackend = backend
    return found

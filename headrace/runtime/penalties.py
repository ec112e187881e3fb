"""Logit processors: what requests want changed in their logits before a token is picked.

Each holds the rows of one step that want it, as flat lists of (row, token), so its cost follows what is asked for
and not the vocabulary. They are applied in place, in vLLM's order: grammar, allowed tokens, bad words, minimum
length, bias, penalties.

Legend: R rows of the step's logits, V vocabulary, N rows or entries of one processor, L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.reference import token_mask as reference_token_mask
from headrace.runtime.row_parts import row_parts


class LogitProcessor(Protocol):
    """Changes some rows of the logits."""

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` [R, V] float32 in place."""


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMask:
    """Tokens that a grammar forbids get -inf.

    rows: [N] int64.
    words: [N, ceil(V / 32)] int32; bit i of word w allows token 32 * w + i. Tokens past the last word are forbidden.
    kernels: a ``token_mask`` module of ``headrace.kernels``.
    """

    rows: Tensor
    words: Tensor
    kernels: Any = reference_token_mask

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` in place."""
        self.kernels.apply_token_mask(logits, self.rows, self.words)


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """All tokens of some rows but the named ones get -inf.

    whole_rows: [number of rows] int64.  rows, tokens: [N] int64, what is allowed.
    """

    whole_rows: Tensor
    rows: Tensor
    tokens: Tensor

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` in place."""
        kept = logits[self.rows, self.tokens]
        logits.index_fill_(0, self.whole_rows, -torch.inf)
        logits[self.rows, self.tokens] = kept


@dataclass(frozen=True, slots=True, eq=False)
class BannedTokens:
    """Single tokens get -inf: bad words of one token, ends of text before the minimum length.

    rows, tokens: [N] int64.
    """

    rows: Tensor
    tokens: Tensor

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` in place."""
        logits[self.rows, self.tokens] = -torch.inf


@dataclass(frozen=True, slots=True, eq=False)
class BannedSequences:
    """The last token of a bad word gets -inf where the generated tokens end in the rest of it.

    The tokens are read from the device's table, so nothing waits for the host to know them.

    token_table: [slots, length] int32.
    rows, slots, last_tokens: [N] int64.
    starts: [N] int64, where in the sequence the rest of the word would begin.
    prefixes: [N, P] int32, the words without their last tokens, padded with -1.
    """

    token_table: Tensor
    rows: Tensor
    slots: Tensor
    starts: Tensor
    prefixes: Tensor
    last_tokens: Tensor

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` in place."""
        offsets = torch.arange(self.prefixes.shape[1], device=logits.device)
        places = (self.starts[:, None] + offsets).clamp_(max=self.token_table.shape[1] - 1)
        found = self.token_table[self.slots[:, None], places]
        is_match = ((found == self.prefixes) | (self.prefixes < 0)).all(-1)
        # Two words may end alike, so the mask is added: writing could undo the other's.
        penalty = torch.zeros_like(is_match, dtype=logits.dtype).masked_fill_(is_match, -torch.inf)
        logits.index_put_((self.rows, self.last_tokens), penalty, accumulate=True)


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Numbers added to single logits.

    rows, tokens: [N] int64, no pair twice.  values: [N] float32.
    """

    rows: Tensor
    tokens: Tensor
    values: Tensor

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` in place."""
        logits[self.rows, self.tokens] += self.values


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Repetition penalty over prompt and answer, frequency and presence penalty over the answer.

    token_table: [slots, length] int32.
    rows, slots, lengths, num_prompt_tokens: [N] int64.
    max_length: the largest of ``lengths``.
    repetition, frequency, presence: [N] float32.
    """

    token_table: Tensor
    rows: Tensor
    slots: Tensor
    lengths: Tensor
    num_prompt_tokens: Tensor
    max_length: int
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def apply(self, logits: Tensor) -> None:
        """Change ``logits`` in place."""
        parts = list(row_parts(len(self.rows), logits.shape[1], logits.device))
        counts = torch.zeros((parts[0].stop, logits.shape[1]), dtype=torch.int32, device=logits.device)
        for part in parts:
            self._apply_part(logits, part, counts)

    def _apply_part(self, logits: Tensor, part: slice, counts: Tensor) -> None:
        """Penalize the rows ``part``; ``counts`` is zero before and after."""
        tokens = self.token_table[self.slots[part], : self.max_length].long()
        places = torch.arange(self.max_length, device=logits.device)
        is_token = places < self.lengths[part, None]
        # Past the end stands the first token again: it has been seen anyhow and is not counted.
        tokens = torch.where(is_token, tokens, tokens[:, :1])
        is_output = is_token & (places >= self.num_prompt_tokens[part, None])
        counts = counts[: len(tokens)].scatter_add_(1, tokens, is_output.int())
        count = counts.gather(1, tokens)
        counts.scatter_(1, tokens, 0)
        rows = self.rows[part, None]
        values = logits[rows, tokens]
        repetition = self.repetition[part, None]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self.frequency[part, None] * count + self.presence[part, None] * (count > 0)
        # A token that occurs often is written often, the same number each time.
        logits[rows, tokens] = values

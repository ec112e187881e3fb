"""SamplingStates: the sampling parameters of every request that the device holds, by slot."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from headrace.core.output import NewRequest
from headrace.core.token_mask import TokenMask
from headrace.kernels.registry import load_kernels
from headrace.runtime.noise import noise_keys
from headrace.runtime.penalties import (
    AllowedTokens,
    BannedSequences,
    BannedTokens,
    GrammarMask,
    LogitBias,
    LogitProcessor,
    Penalties,
)
from headrace.runtime.sampler import RandomRows, SamplingBatch
from headrace.runtime.upload import upload

MIN_TEMPERATURE = 1e-5
"""Below it the best token is taken, as in vLLM."""

IntArray = np.ndarray


class Feature(enum.IntFlag):
    """What a request asks for beyond the best token. Features absent from a step cost it nothing."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    ALLOWED = 16
    BANNED = 32
    MIN_TOKENS = 64
    SEQUENCES = 128
    BIAS = 256
    PENALTIES = 512
    LOGPROBS = 1024


_RANDOM = int(Feature.RANDOM)
_FILTERS = Feature.TOP_K | Feature.TOP_P | Feature.MIN_P
_PROCESSORS = (
    Feature.ALLOWED
    | Feature.BANNED
    | Feature.MIN_TOKENS
    | Feature.SEQUENCES
    | Feature.BIAS
    | Feature.PENALTIES
)


@dataclass(frozen=True, slots=True, eq=False)
class PlainDraw:
    """What [S] rows draw with, before any filter: temperature float32 (1 where the best token is taken), key int64,
    is_random bool."""

    temperature: np.ndarray
    key: np.ndarray
    is_random: np.ndarray


class _TokenRules:
    """One request's lists of tokens, checked and as arrays."""

    def __init__(self, new: NewRequest, vocab_size: int) -> None:
        params = new.sampling_params
        bad_words = [
            word for word in params.bad_word_ids or [] if word and all(0 <= t < vocab_size for t in word)
        ]
        stops = {*new.eos_token_ids, *(params.stop_token_ids or [])}
        bias = params.logit_bias or {}
        self.allowed = np.array(sorted(set(params.allowed_token_ids or [])), np.int64)
        self.banned = np.array(sorted({word[0] for word in bad_words if len(word) == 1}), np.int64)
        self.stops = np.array(sorted(token for token in stops if token < vocab_size), np.int64)
        self.sequences = [word for word in bad_words if len(word) > 1]
        self.bias_tokens = np.array(list(bias), np.int64)
        self.bias_values = np.array(list(bias.values()), np.float32)


class SamplingStates:
    """Arrays indexed by slot, filled when a request comes and gathered for the rows of each step.

    Args:
        max_num_seqs: slots.
        vocab_size: width of the logits.
        device: where the sampler runs.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._mask_kernels = load_kernels("token_mask", device)
        self._features = np.zeros(max_num_seqs, np.int64)
        self._num_asking = 0  # slots with features, be they in use or not
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._child = np.zeros(max_num_seqs, np.int64)
        self._repetition = np.ones(max_num_seqs, np.float32)
        self._frequency = np.zeros(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, np.int64)
        self._rules: list[_TokenRules | None] = [None] * max_num_seqs

    def add(self, slot: int, new: NewRequest) -> None:
        """Take over a request's parameters; whatever the slot held before is forgotten."""
        params = new.sampling_params
        rules = _TokenRules(new, self._vocab_size)
        features = _features(new, rules)
        self._num_asking += bool(features) - bool(self._features[slot])
        self._features[slot] = features
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = np.array(new.sample_seed & ((1 << 64) - 1), np.uint64).astype(np.int64)
        self._child[slot] = new.child_index
        self._repetition[slot] = params.repetition_penalty
        self._frequency[slot] = params.frequency_penalty
        self._presence[slot] = params.presence_penalty
        self._num_prompt_tokens[slot] = new.num_prompt_tokens
        self._min_tokens[slot] = params.min_tokens
        self._num_logprobs[slot] = params.logprobs or 0
        self._rules[slot] = rules if features & _PROCESSORS else None

    def make_batch(
        self, slots: IntArray, positions: IntArray, token_table: torch.Tensor, mask: TokenMask | None = None
    ) -> SamplingBatch:
        """What the sampler needs for one step.

        Args:
            slots: [R] int64, the requests that sample, in the order of the logits' rows.
            positions: [R] int64, index of each one's new token in its sequence.
            token_table: [slots, length] int32 on the device, for penalties and bad words.
            mask: of the rows with a grammar, or None.
        """
        features = self._features[slots]
        present = int(np.bitwise_or.reduce(features, initial=0))
        processors: list[LogitProcessor] = []
        if mask is not None:
            rows, words = upload([mask.rows, mask.words.view(np.int32)], self._device)
            processors.append(GrammarMask(rows, words, self._mask_kernels))
        if present & _PROCESSORS:
            processors += self._processors(features, present, slots, positions, token_table)
        logprob_rows = np.flatnonzero(features & Feature.LOGPROBS) if present & Feature.LOGPROBS else None
        return SamplingBatch(
            processors=processors,
            random=self._random_rows(features, slots, positions) if present & Feature.RANDOM else None,
            logprob_rows=logprob_rows,
            num_logprobs=[] if logprob_rows is None else self._num_logprobs[slots[logprob_rows]].tolist(),
        )

    def takes_best(self, slots: IntArray) -> bool:
        """Whether these requests ask for nothing but the best token."""
        return not self._num_asking or not self._features[slots].any()

    def plain_draw(self, slots: IntArray, positions: IntArray) -> tuple[bool, PlainDraw | None]:
        """Whether these requests ask for nothing but the best token, or one drawn without filters; and what they draw
        with, or None: they all take their best token.

        Args:
            slots, positions: as in ``make_batch``.
        """
        features = self._features[slots]
        present = int(np.bitwise_or.reduce(features, initial=0))
        is_plain = not present & ~_RANDOM
        if not present & _RANDOM:
            return is_plain, None
        is_random = (features & _RANDOM) != 0
        temperature = np.where(is_random, self._temperature[slots], np.float32(1.0))
        key = noise_keys(self._seed[slots], self._child[slots], positions)
        return is_plain, PlainDraw(temperature, key, is_random)

    def _random_rows(self, features: IntArray, slots: IntArray, positions: IntArray) -> RandomRows:
        rows = np.flatnonzero(features & Feature.RANDOM)
        filters = int(np.bitwise_or.reduce(features[rows])) & _FILTERS
        chosen = slots[rows]
        top_k = self._top_k[chosen]
        arrays = [
            rows,
            self._temperature[chosen],
            noise_keys(self._seed[chosen], self._child[chosen], positions[rows]),
        ]
        for feature, values in (
            (Feature.TOP_K, top_k),
            (Feature.TOP_P, self._top_p[chosen]),
            (Feature.MIN_P, self._min_p[chosen]),
        ):
            if filters & feature:
                arrays.append(values)
        tensors = iter(upload(arrays, self._device))
        return RandomRows(
            rows=next(tensors),
            temperature=next(tensors),
            key=next(tensors),
            top_k=next(tensors) if filters & Feature.TOP_K else None,
            top_p=next(tensors) if filters & Feature.TOP_P else None,
            min_p=next(tensors) if filters & Feature.MIN_P else None,
            max_top_k=int(top_k.max()),
            is_whole_batch=len(rows) == len(slots),
        )

    def _processors(
        self, features: IntArray, present: int, slots: IntArray, positions: IntArray, table: torch.Tensor
    ) -> Iterator[LogitProcessor]:
        """The processors of a step, in the order in which they are applied."""

        def asking(feature: Feature) -> IntArray:
            return np.flatnonzero(features & feature)

        if present & Feature.ALLOWED:
            rows = asking(Feature.ALLOWED)
            lists = [self._rules_of(slot).allowed for slot in slots[rows]]
            yield AllowedTokens(*upload([rows, *_flatten(rows, lists)], self._device))
        if present & Feature.BANNED:
            yield from self._banned(asking(Feature.BANNED), slots, "banned")
        if present & Feature.SEQUENCES:
            yield from self._banned_sequences(asking(Feature.SEQUENCES), slots, positions, table)
        if present & Feature.MIN_TOKENS:
            rows = asking(Feature.MIN_TOKENS)
            num_outputs = positions[rows] - self._num_prompt_tokens[slots[rows]]
            yield from self._banned(rows[num_outputs < self._min_tokens[slots[rows]]], slots, "stops")
        if present & Feature.BIAS:
            rows = asking(Feature.BIAS)
            rules = [self._rules_of(slot) for slot in slots[rows]]
            pairs = _flatten(rows, [rule.bias_tokens for rule in rules])
            values = np.concatenate([rule.bias_values for rule in rules])
            yield LogitBias(*upload([*pairs, values], self._device))
        if present & Feature.PENALTIES:
            yield self._penalties(asking(Feature.PENALTIES), slots, positions, table)

    def _banned(self, rows: IntArray, slots: IntArray, field: str) -> Iterator[LogitProcessor]:
        if len(rows):
            lists: list[IntArray] = [getattr(self._rules_of(slot), field) for slot in slots[rows]]
            yield BannedTokens(*upload(_flatten(rows, lists), self._device))

    def _banned_sequences(
        self, rows: IntArray, slots: IntArray, positions: IntArray, table: torch.Tensor
    ) -> Iterator[LogitProcessor]:
        entries = []
        for row in rows.tolist():
            slot, position = int(slots[row]), int(positions[row])
            for word in self._rules_of(slot).sequences:
                start = position - len(word) + 1
                if start >= self._num_prompt_tokens[slot]:  # only the answer counts
                    entries.append((row, slot, start, word))
        if not entries:
            return
        prefixes = np.full((len(entries), max(len(word) for *_, word in entries) - 1), -1, np.int32)
        for entry, (*_, word) in enumerate(entries):
            prefixes[entry, : len(word) - 1] = word[:-1]
        columns = np.array([(row, slot, start, word[-1]) for row, slot, start, word in entries], np.int64)
        row_ids, slot_ids, starts, last_tokens = columns.T.copy()
        tensors = upload([row_ids, slot_ids, starts, prefixes, last_tokens], self._device)
        yield BannedSequences(table, *tensors)

    def _penalties(
        self, rows: IntArray, slots: IntArray, positions: IntArray, table: torch.Tensor
    ) -> LogitProcessor:
        chosen, lengths = slots[rows], positions[rows]
        arrays = [rows, chosen, lengths, self._num_prompt_tokens[chosen]]
        arrays += [self._repetition[chosen], self._frequency[chosen], self._presence[chosen]]
        names = ("rows", "slots", "lengths", "num_prompt_tokens", "repetition", "frequency", "presence")
        tensors = dict(zip(names, upload(arrays, self._device), strict=True))
        return Penalties(token_table=table, max_length=int(lengths.max()), **tensors)

    def _rules_of(self, slot: int) -> _TokenRules:
        rules = self._rules[slot]
        assert rules is not None
        return rules


def find_token_error(new: NewRequest, vocab_size: int) -> str | None:
    """Why a request's token ids cannot be used with this vocabulary, or None."""
    params = new.sampling_params
    for name, ids in (
        ("the prompt", new.token_ids),
        ("allowed_token_ids", params.allowed_token_ids or []),
        ("logit_bias", params.logit_bias or []),
    ):
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < vocab_size:
                return f"token id {token} of {name} is outside the vocabulary of {vocab_size}"
    return None


def _features(new: NewRequest, rules: _TokenRules) -> Feature:
    params = new.sampling_params
    asked = {
        Feature.RANDOM: params.temperature >= MIN_TEMPERATURE,
        Feature.TOP_K: params.top_k > 0,
        Feature.TOP_P: params.top_p < 1.0,
        Feature.MIN_P: params.min_p > 0.0,
        Feature.ALLOWED: len(rules.allowed) > 0,
        Feature.BANNED: len(rules.banned) > 0,
        Feature.MIN_TOKENS: params.min_tokens > 0 and len(rules.stops) > 0,
        Feature.SEQUENCES: len(rules.sequences) > 0,
        Feature.BIAS: len(rules.bias_tokens) > 0,
        Feature.PENALTIES: (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        != (1.0, 0.0, 0.0),
        Feature.LOGPROBS: params.logprobs is not None,
    }
    total = Feature(0)
    for feature, is_asked in asked.items():
        if is_asked:
            total |= feature
    return total


def _flatten(rows: IntArray, lists: list[IntArray]) -> list[IntArray]:
    """[row of each entry, entries] of one list per row."""
    return [np.repeat(rows, [len(entries) for entries in lists]), np.concatenate(lists)]

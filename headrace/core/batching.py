"""How a step is composed: which stages run, and how much prompt may join the running streams."""

from __future__ import annotations

import math
from enum import Enum

from headrace.core.cost_model import CostModel, StepFeatures


class Stage(Enum):
    """One pass of ``Scheduler.schedule`` over requests."""

    DECODE = "decode"  # running requests that need one token
    CHUNK = "chunk"  # running requests with more tokens to compute
    ADMIT = "admit"  # waiting requests


class ContinuousBatching:
    """Every step mixes decodes and prompt chunks (Orca's iteration-level scheduling with Sarathi's and
    Dynamic SplitFuse's chunks): decodes first, then as much prompt as keeps the step within ``max_stall_ms``.

    Without a limit (infinite ``max_stall_ms``) a prompt gets all that the budget and its pace (``PromptPace``) leave.
    With no stream running a step may take ``idle_factor`` times as long, so that cancels and new requests are never far
    from a step's end. The first step with prompts has ``unknown_chunk_tokens`` at most, times that factor where no
    stream runs, and the next ones what fits by the time of a token in the one before, until the cost model has seen
    some of them. While a shorter prompt waits, the first one of a step takes half of what fits: the
    short one starts within a few steps, and the long one always advances. Prompts of like lengths go one after the
    other: side by side the first would end later, and the last no sooner.
    """

    min_chunk_tokens = 16
    unknown_chunk_tokens = 256
    idle_factor = 4

    def __init__(self, cost_model: CostModel, max_stall_ms: float) -> None:
        self._cost_model = cost_model
        self._max_stall_ms = max_stall_ms

    def stages(self, num_running: int) -> list[list[Stage]]:
        """Alternatives in order: the first whose stages schedule anything makes the step."""
        return [[Stage.DECODE, Stage.CHUNK, Stage.ADMIT]]

    def chunk_tokens(
        self, decodes: int, features: StepFeatures, start: int, wanted: int, has_shorter: bool
    ) -> int:
        """How many prompt tokens from position ``start`` may join a step that holds ``features``, ``decodes`` of its
        requests being running streams. A prompt always advances by a few tokens.

        wanted: at most so many.
        has_shorter: the prompt does not end with these, and a shorter one wants to join the step after it.
        """
        if math.isinf(self._max_stall_ms):
            return wanted
        is_first = features.num_requests == decodes
        scale = 1 if decodes else self.idle_factor
        allowed = wanted
        limit_ms = self._max_stall_ms * scale
        if not self._cost_model.knows_prompts:  # all prompts of the step together
            token_ms = self._cost_model.prompt_token_ms
            fitting = int(limit_ms / token_ms) if token_ms else self.unknown_chunk_tokens * scale
            allowed = max(0, min(wanted, fitting - features.num_tokens))
        if self._cost_model.is_fitted:
            allowed = self._cost_model.max_chunk(features, start, allowed, limit_ms)
        if not is_first:
            return allowed
        if has_shorter:
            allowed = (allowed + 1) // 2
        return max(allowed, min(wanted, self.min_chunk_tokens))


class PrefillFirst:
    """Whole prompts as soon as they arrive, running streams stall meanwhile (vLLM's first scheduler). For measuring."""

    def stages(self, num_running: int) -> list[list[Stage]]:
        return [[Stage.CHUNK, Stage.ADMIT], [Stage.DECODE]]

    def chunk_tokens(
        self, decodes: int, features: StepFeatures, start: int, wanted: int, has_shorter: bool
    ) -> int:
        return wanted


class StaticBatching:
    """A batch is formed once and the next one only when all its requests are done. For measuring."""

    def stages(self, num_running: int) -> list[list[Stage]]:
        return [[Stage.DECODE, Stage.CHUNK]] if num_running else [[Stage.ADMIT]]

    def chunk_tokens(
        self, decodes: int, features: StepFeatures, start: int, wanted: int, has_shorter: bool
    ) -> int:
        return wanted


Batching = ContinuousBatching | PrefillFirst | StaticBatching


def make_batching(name: str, cost_model: CostModel, max_stall_ms: float) -> Batching:
    """The strategy named in ``SchedulerConfig.batching``."""
    if name == "continuous":
        return ContinuousBatching(cost_model, max_stall_ms)
    return PrefillFirst() if name == "prefill-first" else StaticBatching()

"""ModelRunner: runs one step of the model over persistent request states, and samples from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import numpy as np
import torch

from headrace.attention.base import AttentionBackend
from headrace.attention.metadata import ForwardBatch
from headrace.core.output import (
    NO_TOKEN_KIND,
    NO_TOKEN_LEFT,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from headrace.core.token_mask import TokenMask
from headrace.kernels.reference import sampling as reference_sampling
from headrace.layers.sliced_logits import SlicedLogits
from headrace.runtime.input_batch import InputBatchBuilder
from headrace.runtime.kv_cache import KVCache
from headrace.runtime.logprobs import compute_logprobs
from headrace.runtime.request_states import RequestStates
from headrace.runtime.sampler import PackedTokens, Sampler, SamplerOutput
from headrace.runtime.step_layout import StepLayout, StepLayouts
from headrace.runtime.step_result import StepResult
from headrace.runtime.upload import upload


class Model(Protocol):
    """What the runner needs of a model (``models/<model_type>.py``)."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E] of every token."""

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """Logits of the hidden states ``rows`` [R] int64; valid until the next call."""


class SmallSteps(Protocol):
    """Runs steps that are small enough faster (``GraphedSteps``)."""

    def run(self, step: StepLayout) -> StepResult | None:
        """Run a step, or return None and leave it."""


class BestTokens(Protocol):
    """Picks the best token of each row without leaving logits behind (``NativeStep.best_tokens``)."""

    def __call__(self, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """([R] float32, [R] int64): largest logits and their tokens; None: it takes the logits."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingOutput:
    """A step's results on their way to the host; ``finish`` when the device has passed the step's end."""

    step_id: int
    request_ids: list[str]
    logprob_rows: np.ndarray | None
    sampled: SamplerOutput | None
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    errors: dict[str, str]
    is_preparing: bool = False

    def finish(self) -> ModelRunnerOutput:
        """The results. The copies to the host were queued with the step; whoever calls has waited for its end."""
        output = ModelRunnerOutput(
            self.step_id,
            prompt_logprobs=self.prompt_logprobs,
            errors=self.errors,
            is_preparing=self.is_preparing,
        )
        if self.sampled is None:
            return output
        tokens = self.sampled.token_ids.tolist()
        best_logits = self.sampled.best_logits.numpy()
        if not np.isfinite(best_logits).all():
            for row in np.flatnonzero(~np.isfinite(best_logits)).tolist():
                self._fail(output, self.request_ids[row], float(best_logits[row]))
        output.request_ids, output.sampled_token_ids = self.request_ids, [[token] for token in tokens]
        good = [name not in self.errors for name in self.request_ids] if self.errors else None
        if good is not None:
            output.request_ids = list(compress(self.request_ids, good))
            output.sampled_token_ids = list(compress(output.sampled_token_ids, good))
        if self.sampled.logprobs is not None and self.logprob_rows is not None:
            entries = self.sampled.logprobs.to_host()
            for row, entry in zip(self.logprob_rows.tolist(), entries, strict=True):
                if good is None or good[row]:
                    output.logprobs[self.request_ids[row]] = [entry]
        return output

    def _fail(self, output: ModelRunnerOutput, request_id: str, best_logit: float) -> None:
        """A request whose best logit is no number: it forbids every token, or something is broken."""
        message = (
            f"the model's logits are not finite (the largest is {best_logit}); the weights or the KV cache are "
            "broken"
        )
        if best_logit == -np.inf and request_id not in self.errors:
            message, output.refusals[request_id] = NO_TOKEN_LEFT, NO_TOKEN_KIND
        self.errors.setdefault(request_id, message)


class ModelRunner:
    """Two calls a step, in step order. Everything between them stays on the device.

    Args:
        model: the loaded model, bound to ``kv_cache``.
        kv_cache: the blocks; copies are made before the forward.
        backends: one attention planner per KV group.
        max_num_seqs, max_model_len: limits of requests and their length.
        vocab_size: width of the logits.
        max_logits_rows: rows whose logits are computed at once for prompt log-probabilities, which bounds memory.
        sampling_kernels: a ``sampling`` module of ``headrace.kernels``.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        backends: Sequence[AttentionBackend],
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        max_logits_rows: int,
        sampling_kernels: Any = reference_sampling,
    ) -> None:
        self._model = model
        self.kv_cache = kv_cache
        self._device = kv_cache.blocks.device
        self._max_logits_rows = max_logits_rows
        self.states = RequestStates(
            max_num_seqs,
            max_model_len,
            len(kv_cache.specs),
            kv_cache.layout.block_size,
            vocab_size,
            self._device,
        )
        self.small_steps: SmallSteps | None = None
        self.best_tokens: BestTokens | None = None
        self._layouts = StepLayouts(self.states, len(kv_cache.specs))
        self._inputs = InputBatchBuilder(self.states, kv_cache.specs, backends, self._device)
        self._kernels = sampling_kernels
        self._sampler = Sampler(sampling_kernels)
        self._step_id = 0
        self._errors: dict[str, str] = {}
        self._step: StepLayout | None = None
        self._result: StepResult | None = None

    def let_go(self) -> None:
        """Forget the model and what was made of it; ``use`` comes before the next step."""
        del self._model
        self.small_steps = self.best_tokens = None

    def use(self, model: Model, small_steps: SmallSteps | None, best_tokens: BestTokens | None) -> None:
        """Compute with this model, bound to the same KV cache, from now on; requests' states stay."""
        self._model, self.small_steps, self.best_tokens = model, small_steps, best_tokens

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, before_forward: Callable[[], None] | None = None
    ) -> None:
        """Run the forward of one step; what it leaves waits for ``sample_tokens``.

        Args:
            before_forward: called when the host has done its part.
        """
        assert self._step is None, "sample_tokens was not called for the last step"
        self._step_id = scheduler_output.step_id
        self._errors = self.states.apply(scheduler_output)
        self._copy_blocks(scheduler_output)
        self._step = step = self._layouts.make(scheduler_output)
        if before_forward is not None:
            before_forward()
        result = self.small_steps.run(step) if self.small_steps is not None else None
        self._result = result or self._run(step)

    @torch.inference_mode()
    def sample_tokens(self, mask: TokenMask | None = None) -> PendingOutput:
        """Sample for the step last executed.

        Args:
            mask: which tokens the constrained requests may sample, or None.
        """
        step, result = self._step, self._result
        assert step is not None and result is not None, "sample_tokens needs one execute_model before it"
        self._step = self._result = None
        prompt_logprobs = self._prompt_logprobs(step, result.hidden)
        logprob_rows, sampled = self._sample(step, result, mask)
        on_host = sampled.start_download() if sampled is not None else None
        return PendingOutput(
            self._step_id,
            step.sampled_ids,
            logprob_rows,
            on_host,
            prompt_logprobs,
            self._errors,
            result.is_preparing,
        )

    def _run(self, step: StepLayout) -> StepResult:
        """The forward of any step, op by op."""
        batch = self._inputs.build(step)
        hidden = self._model.forward(batch.forward)
        return StepResult(hidden, batch.sampled_rows, batch.sampled_places)

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        if output.block_copies:
            table = np.array(
                [(copy.src, copy.dst, copy.num_tokens) for copy in output.block_copies], np.int64
            )
            self.kv_cache.copy_blocks(*upload(list(table.T.copy()), self._device))

    def _sample(
        self, step: StepLayout, result: StepResult, mask: TokenMask | None
    ) -> tuple[np.ndarray | None, SamplerOutput | PackedTokens | None]:
        """Sample, and put the tokens where the next step reads them."""
        if not step.sampled_ids:
            return None, None
        if result.picked is not None and mask is None:
            return None, result.picked
        best = self._best(step, result) if mask is None and result.logits is None else None
        if best is not None:
            self.states.tokens.put(step.sampled_places, result.sampled_places, best.token_ids)
            return None, best
        wanted = self.states.sampling.make_batch(
            step.sampled_slots, step.sampled_positions, self.states.tokens.tensor, mask
        )
        logits = result.logits
        if logits is None:
            logits = self._model.compute_logits(result.hidden, result.sampled_rows)
        sampled = self._sampler.sample(logits, wanted)
        self.states.tokens.put(step.sampled_places, result.sampled_places, sampled.token_ids)
        return wanted.logprob_rows, sampled

    def _best(self, step: StepLayout, result: StepResult) -> SamplerOutput | None:
        """The tokens of a step in which all take the best, if there is a way to them without logits."""
        if self.best_tokens is None or not self.states.sampling.takes_best(step.sampled_slots):
            return None
        found = self.best_tokens(result.hidden, result.sampled_rows)
        return None if found is None else SamplerOutput(found[1], found[0], None)

    def _prompt_logprobs(self, step: StepLayout, hidden: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
        """Entries for the prompt tokens that follow this step's positions, a bounded number of rows at a time."""
        entries: dict[str, list[TokenLogprobs]] = {}
        if not step.prompt_rows:
            return entries
        flat_tokens = self.states.tokens.tensor.view(-1)
        for span in step.prompt_rows:
            num_top = span.request.sampling_params.prompt_logprobs
            assert num_top is not None
            found: list[TokenLogprobs] = []
            for first in range(span.first_row, span.end_row, self._max_logits_rows):
                count = min(self._max_logits_rows, span.end_row - first)
                rows = torch.arange(first, first + count, device=self._device)
                target = span.first_target + first - span.first_row
                tokens = flat_tokens[target : target + count].long()
                logits = self._model.compute_logits(hidden, rows).whole()
                found += compute_logprobs(logits, tokens, [num_top] * count, self._kernels).to_host()
            entries[span.request.request_id] = found
        return entries

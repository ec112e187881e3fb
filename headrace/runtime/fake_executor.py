"""A data plane without tensors: it checks the control plane's block accounting and completes late on purpose."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from headrace.core.interfaces import Clock
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import (
    NO_TOKEN_KIND,
    NO_TOKEN_LEFT,
    ErrorKind,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from headrace.core.token_mask import TokenMask
from headrace.errors import EngineDeadError, RequestError
from headrace.runtime.fake_kv_cache import FakeKVCache, FakeSequence, hash_token

T = TypeVar("T")
NextToken = Callable[[list[int], int], int]


class FakeExecutor:
    """Executes steps by writing prefix hashes into the slots it is told to use and reading them back.

    Every step asserts that the slots it needs hold what earlier steps should have put there, so an error in block
    accounting shows as wrong content (``BlockContentError``). It also asserts the fence: a block must not be written
    while an earlier outstanding step uses it. Steps are simulated at once; only their futures complete late.

    Futures complete in step order, when the caller asks (``done``, ``result``, ``exception``) or makes another call;
    there is no thread, so ``concurrent.futures.wait`` must not be used on them.

    Args:
        specs, num_blocks, block_size: the KV memory that is pretended.
        vocab_size: tokens are drawn from [0, vocab_size).
        step_ms: time of one step on the pretended device, which runs steps one after another; a function of the
            scheduler output for steps of unequal cost.
        lag: number of further ``execute_model`` calls before a step's futures complete by themselves; ``result()``
            forces them, and all earlier ones, in order.
        next_token: (all tokens of the request, child index) -> token; a hash of both by default. A RequestError from
            it fails that request alone, any other exception kills the engine.
        verify: False skips reading back and the fence, for measuring the control plane.
        clock, sleep: for virtual time.
    """

    def __init__(
        self,
        specs: list[KVCacheSpec],
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        step_ms: float | Callable[[SchedulerOutput], float] = 0.0,
        lag: int = 0,
        next_token: NextToken | None = None,
        verify: bool = True,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device_busy_s = 0.0
        self._specs = specs
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._step_ms = step_ms
        self._lag = lag
        self._next_token = next_token
        self._verify = verify
        self._clock = clock
        self._sleep = sleep
        self._cache = FakeKVCache(specs, num_blocks, block_size)
        self._requests: dict[str, FakeRequest] = {}
        self._outstanding: deque[_Step] = deque()
        self._last: _Step | None = None
        self._num_executed = 0
        self._device_free_at = 0.0
        self._failure: BaseException | None = None

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The KV groups that were given."""
        return self._specs

    def num_kv_blocks(self) -> int:
        """The number of blocks that was given."""
        return self._num_blocks

    @property
    def num_steps_outstanding(self) -> int:
        """Steps whose futures are not complete."""
        self.poll()
        return len(self._outstanding)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Write and read the step's slots. Raises BlockContentError where the content or the fence is violated."""
        self._check_alive()
        self.poll()
        assert self._last is None or self._last.output is not None, (
            "sample_tokens was not called for the last step"
        )
        step = _Step(self, scheduler_output, self._num_executed)
        if self._last is not None:
            assert scheduler_output.step_id == self._last.scheduler_output.step_id + 1, (
                f"step {scheduler_output.step_id} after step {self._last.scheduler_output.step_id}"
            )
        self._apply_delta(scheduler_output)
        self._check_batch(scheduler_output)
        self._run_cache(step)
        duration_s = 1e-3 * (self._step_ms(scheduler_output) if callable(self._step_ms) else self._step_ms)
        if duration_s:
            self._device_free_at = max(self._clock(), self._device_free_at) + duration_s
        step.duration_s, step.ends_at = duration_s, self._device_free_at
        self.device_busy_s += duration_s
        self._last = step
        self._num_executed += 1
        self._outstanding.append(step)
        self.poll()
        return step.forward_future

    def sample_tokens(self, mask: TokenMask | None) -> Future[ModelRunnerOutput]:
        """Sample the step last executed."""
        self._check_alive()
        step = self._last
        assert step is not None and step.output is None, "sample_tokens needs one execute_model before it"
        try:
            step.output = self._sample(step, mask)
        except Exception as error:
            self._failure = error
            step.output = ModelRunnerOutput(step.scheduler_output.step_id)
            step.failure = error
        self.poll()
        return step.output_future

    @property
    def is_compiling(self) -> bool:
        """There are no kernels."""
        return False

    def take_pages(self, lowest: int, highest: int) -> bool:
        """There is no memory."""
        return False

    def rank_memory_bytes(self) -> list[int]:
        """A fake holds nothing."""
        return []

    def startup_s(self) -> dict[str, float]:
        """A fake is there at once."""
        return {}

    def update_weights(self, model: str | None) -> None:
        """A fake has no weights, but what it cached is not to be read any more."""
        self._cache.forget()

    def check_alive(self) -> None:
        """A fake fails in its futures only."""

    def shutdown(self) -> None:
        """Refuse further steps; outstanding ones can still be collected."""
        self._failure = self._failure or RuntimeError("the executor was shut down")

    def poll(self) -> None:
        """Complete the futures of steps that are due."""
        while self._outstanding and self._is_due(self._outstanding[0]):
            self._outstanding.popleft().complete()

    def finish(self, step: _Step) -> None:
        """Complete every outstanding step up to ``step``, sleeping as the device would be busy."""
        while self._outstanding and self._outstanding[0].index <= step.index:
            first = self._outstanding[0]
            assert first.output is not None, f"step {first.scheduler_output.step_id} was never sampled"
            delay_s = first.ends_at - self._clock()
            if delay_s > 0:
                self._sleep(delay_s)
            self._outstanding.popleft().complete()

    def _is_due(self, step: _Step) -> bool:
        return (
            step.output is not None
            and self._num_executed - step.index - 1 >= self._lag
            and (not step.duration_s or self._clock() >= step.ends_at)
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the fake device stopped: {self._failure}") from self._failure

    def _apply_delta(self, output: SchedulerOutput) -> None:
        for request_id in output.removed_request_ids:
            assert request_id in self._requests, f"removed request {request_id!r} is unknown"
            del self._requests[request_id]
        for new in output.new_requests:
            assert new.request_id not in self._requests, f"new request {new.request_id!r} is known already"
            assert new.request_id in output.request_ids, f"new request {new.request_id!r} is not in the batch"
            self._cache.check_ids(new.block_ids, lowest=-1)
            self._requests[new.request_id] = FakeRequest(new)
        for request_id, block_ids in output.new_block_ids.items():
            self._cache.check_ids(block_ids, lowest=0)
            self._requests[request_id].sequence.append_blocks(block_ids)
        for request_id, count in output.kept_tokens.items():
            self._requests[request_id].cut(count)
        for request_id, token_ids in output.appended_token_ids.items():
            self._requests[request_id].append(token_ids)

    def _check_batch(self, output: SchedulerOutput) -> None:
        ids = output.request_ids
        assert len(set(ids)) == len(ids), "a request is in the batch twice"
        assert len(ids) == len(output.start_positions) == len(output.num_tokens)
        for request_id, start, count in zip(ids, output.start_positions, output.num_tokens, strict=True):
            assert request_id in self._requests, f"request {request_id!r} was never sent"
            known = len(self._requests[request_id].token_ids)
            assert count >= 1 and start >= 0 and start + count <= known, (
                f"request {request_id!r}: positions [{start}, {start + count}) of {known} known tokens"
            )
        for index in output.sampled:
            known = len(self._requests[ids[index]].token_ids)
            end = output.start_positions[index] + output.num_tokens[index]
            assert end == known, f"request {ids[index]!r} samples at {end} but has {known} tokens"

    def _run_cache(self, step: _Step) -> None:
        output = step.scheduler_output
        spans = [
            (self._requests[request_id].sequence, start, start + count)
            for request_id, start, count in zip(
                output.request_ids, output.start_positions, output.num_tokens, strict=True
            )
        ]
        if self._verify:
            earlier = [other.uses for other in self._outstanding]
            self._cache.check_fence(earlier, output.block_copies, spans)
            self._cache.check_shared_prefixes(output.shared_prefixes, [span[0] for span in spans])
            step.uses = self._cache.uses(output.block_copies, spans)
        for copy in output.block_copies:
            self._cache.copy(copy)
        for sequence, start, end in spans:
            self._cache.write(sequence, start, end)
        if self._verify:
            for sequence, start, end in spans:
                self._cache.check_content(sequence, start, end)

    def _sample(self, step: _Step, mask: TokenMask | None) -> ModelRunnerOutput:
        scheduled = step.scheduler_output
        output = ModelRunnerOutput(scheduled.step_id, elapsed_ms=1e3 * step.duration_s)
        for index, request_id in enumerate(scheduled.request_ids):
            request = self._requests[request_id]
            entries = request.prompt_logprobs(
                scheduled.start_positions[index], scheduled.num_tokens[index], self._vocab_size
            )
            if entries:
                output.prompt_logprobs[request_id] = entries
        masks = {} if mask is None else dict(zip(mask.rows.tolist(), mask.words, strict=True))
        for row, index in enumerate(scheduled.sampled):
            request = self._requests[scheduled.request_ids[index]]
            try:
                token = self._pick(request, masks.get(row))
            except RequestError as error:
                output.errors[request.request_id] = str(error)
                if error.code is not None:
                    output.refusals[request.request_id] = ErrorKind("RequestError", error.param, error.code)
                request.append([0])  # a step that ran ahead reads some token here; it is discarded
                continue
            output.request_ids.append(request.request_id)
            output.sampled_token_ids.append([token])
            if request.params.logprobs is not None:
                output.logprobs[request.request_id] = [
                    fake_logprobs(token, request.params.logprobs, self._vocab_size)
                ]
            request.append([token])
        return output

    def _pick(self, request: FakeRequest, mask_row: Any | None) -> int:
        if self._next_token is not None:
            token = self._next_token(list(request.token_ids), request.child_index)
        else:
            last_hash = self._cache.read(request.sequence, len(request.token_ids) - 1)
            token = hash_token(last_hash, request.child_index) % self._vocab_size
        if mask_row is None:
            return token
        bits = np.unpackbits(np.asarray(mask_row, np.uint32).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: self._vocab_size])
        params = request.params
        if params.allowed_token_ids is not None:
            allowed = np.intersect1d(allowed, params.allowed_token_ids)
        banned = [word[0] for word in params.bad_word_ids or [] if len(word) == 1]
        allowed = np.setdiff1d(allowed, banned)
        if not len(allowed):
            raise RequestError(NO_TOKEN_LEFT, code=NO_TOKEN_KIND.code)
        return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


class FakeRequest:
    """What the device holds of one request."""

    def __init__(self, new: NewRequest) -> None:
        self.request_id = new.request_id
        self.token_ids: list[int] = []
        self.num_prompt_tokens = new.num_prompt_tokens
        self.params = new.sampling_params
        self.prompt_logprobs_from = new.prompt_logprobs_from
        self.child_index = new.child_index
        self.prompt_logprobs_from = new.prompt_logprobs_from
        self.sequence = FakeSequence(new.request_id, new.block_ids)
        self.append(new.token_ids)

    def append(self, token_ids: list[int]) -> None:
        """Add known tokens at the end."""
        self.sequence.append_tokens(len(self.token_ids), token_ids)
        self.token_ids += token_ids

    def cut(self, num_tokens: int) -> None:
        """Keep the first tokens only; KV of none of the others is in place."""
        del self.token_ids[num_tokens:]

    def prompt_logprobs(self, start: int, count: int, vocab_size: int) -> list[TokenLogprobs]:
        """Entries for the prompt tokens after each of ``count`` positions from ``start``, as the real runner gives."""
        if not self.prompt_logprobs_from or self.params.prompt_logprobs is None:
            return []
        first = max(start + 1, self.prompt_logprobs_from)
        tokens = self.token_ids[first : min(start + count + 1, self.num_prompt_tokens)]
        return [fake_logprobs(token, self.params.prompt_logprobs, vocab_size) for token in tokens]


class _Step:
    """One outstanding step: its futures and the blocks it uses."""

    def __init__(self, executor: FakeExecutor, scheduler_output: SchedulerOutput, index: int) -> None:
        self.scheduler_output = scheduler_output
        self.index = index
        self.duration_s = 0.0
        self.ends_at = 0.0
        self.uses = np.zeros(0, np.int32)
        self.output: ModelRunnerOutput | None = None
        self.failure: BaseException | None = None
        self.forward_future: _StepFuture[None] = _StepFuture(executor, self)
        self.output_future: _StepFuture[ModelRunnerOutput] = _StepFuture(executor, self)

    def complete(self) -> None:
        """Give both futures their results."""
        self.forward_future.set_result(None)
        if self.failure is not None:
            dead = EngineDeadError(f"step {self.scheduler_output.step_id} failed: {self.failure}")
            dead.__cause__ = self.failure
            self.output_future.set_exception(dead)
        else:
            assert self.output is not None
            self.output_future.set_result(self.output)


class _StepFuture(Future[T]):
    """A future that asks its executor to finish when somebody wants the result."""

    def __init__(self, executor: FakeExecutor, step: _Step) -> None:
        super().__init__()
        self._executor = executor
        self._step = step

    def done(self) -> bool:
        """True once the step is complete."""
        self._executor.poll()
        return super().done()

    def result(self, timeout: float | None = None) -> T:
        """Finish the step and all before it, then give its result."""
        self._executor.finish(self._step)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Finish the step and all before it, then give its failure or None."""
        self._executor.finish(self._step)
        return super().exception(timeout)


def fake_logprobs(token: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """The token itself, then ``num_top`` pretended best ones (the token is the best of them)."""
    count = vocab_size if num_top == -1 else min(num_top, vocab_size)
    top = [(token + offset) % vocab_size for offset in range(count)]
    return TokenLogprobs([token, *top], [-1.0, *(-1.0 - offset for offset in range(count))], 1)

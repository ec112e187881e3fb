"""Taking in a step's results: tokens are committed, requests stop, their news go out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.output import EngineCoreOutput, ModelRunnerOutput
from headrace.core.request import FinishReason, Request, RequestStatus
from headrace.core.step import Step

if TYPE_CHECKING:
    from headrace.core.scheduler import Scheduler


def complete_step(scheduler: Scheduler, step: Step, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
    """Apply the results of the oldest step in flight; the news of every request that has some."""
    _commit_progress(scheduler, step)
    news: list[EngineCoreOutput] = []
    if output.prompt_logprobs:
        _deliver_prompt_logprobs(step, output, news)
    any_finished = bool(output.errors) and _fail_requests(scheduler, step, output, news)
    for request, tokens in _sampled_pairs(step, output):
        if request.status is RequestStatus.FINISHED:
            continue  # it ran ahead of its end, or was cancelled: the tokens are discarded
        request.num_placeholders -= 1
        item = _commit_tokens(scheduler, request, tokens, output)
        news.append(item)
        any_finished = any_finished or item.finish_reason is not None
    if any_finished:
        scheduler.drop_finished()
    return news


def _commit_progress(scheduler: Scheduler, step: Step) -> None:
    """The step's KV is in place: full blocks enter the radix tree."""
    kv = scheduler.kv
    block_size = kv.block_size
    for request, end in zip(step.requests, step.ends, strict=True):
        request.num_steps_in_flight -= 1
        if request.status is RequestStatus.RUNNING:
            before = request.num_committed_tokens
            request.num_committed_tokens = end
            if end // block_size != before // block_size:
                kv.commit(request)


def _sampled_pairs(step: Step, output: ModelRunnerOutput) -> list[tuple[Request, list[int]]]:
    if not output.errors:
        return list(zip(step.sampled, output.sampled_token_ids, strict=True))
    by_id = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    return [(request, by_id[request.request_id]) for request in step.sampled if request.request_id in by_id]


def _commit_tokens(
    scheduler: Scheduler, request: Request, tokens: list[int], output: ModelRunnerOutput
) -> EngineCoreOutput:
    """Append sampled tokens up to the first that ends the request."""
    token_ids, stop_ids = request.token_ids, request.stop_token_ids
    now = scheduler.clock()
    count = 0
    reason: FinishReason | None = None
    for token in tokens:
        token_ids.append(token)
        request.timeline.token_times.append(now)
        count += 1
        if token in stop_ids and request.num_output_tokens > request.sampling_params.min_tokens:
            reason = FinishReason.STOP
            break
        if len(token_ids) >= request.max_total_tokens:
            reason = FinishReason.LENGTH
            break
    item = EngineCoreOutput(request.parent_id, request.child_index, tokens[:count])
    if output.logprobs:
        logprobs = output.logprobs.get(request.request_id)
        item.logprobs = logprobs[:count] if logprobs is not None else None
    item.num_cached_tokens = request.num_cached_tokens
    if reason is not None:
        is_stop_token = reason is FinishReason.STOP and token not in request.eos_token_ids
        finish(scheduler, request, item, reason, token if is_stop_token else None)
    return item


def finish(
    scheduler: Scheduler,
    request: Request,
    item: EngineCoreOutput,
    reason: FinishReason,
    stop_reason: int | str | None = None,
    message: str | None = None,
) -> None:
    """End ``request`` and let ``item`` say so."""
    scheduler.finish(request, reason, stop_reason, message)
    item.finish_reason, item.stop_reason, item.message = reason.value, stop_reason, message
    item.num_cached_tokens = request.num_cached_tokens
    item.timeline = request.timeline


def _deliver_prompt_logprobs(step: Step, output: ModelRunnerOutput, news: list[EngineCoreOutput]) -> None:
    for request in step.requests:
        entries = output.prompt_logprobs.get(request.request_id)
        if entries and not request.is_finished:
            request.next_prompt_logprob += len(entries)
            news.append(EngineCoreOutput(request.parent_id, request.child_index, prompt_logprobs=entries))


def _fail_requests(
    scheduler: Scheduler, step: Step, output: ModelRunnerOutput, news: list[EngineCoreOutput]
) -> bool:
    """Requests whose own step failed end alone, with the message."""
    for request in step.requests:
        message = output.errors.get(request.request_id)
        if message is not None and not request.is_finished:
            item = EngineCoreOutput(request.parent_id, request.child_index)
            finish(scheduler, request, item, FinishReason.ERROR, message=message)
            news.append(item)
    return True

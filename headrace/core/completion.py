"""Taking in a step's results: tokens are committed, requests stop, their news go out."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.admission import OutputLengthEstimator
from headrace.core.interfaces import ChoiceScene, TokenChooser
from headrace.core.lifecycle import RUNNING, Lifecycle
from headrace.core.output import EngineCoreOutput, ModelRunnerOutput
from headrace.core.request import FinishReason, Request, RequestStatus
from headrace.core.step import Step

FINISHED = RequestStatus.FINISHED


def complete_step(
    scene: ChoiceScene, estimator: OutputLengthEstimator, step: Step, output: ModelRunnerOutput
) -> list[EngineCoreOutput]:
    """Apply the results of the oldest step in flight; the news of every request that has some."""
    lifecycle, now = scene.lifecycle, scene.now
    news: list[EngineCoreOutput] = []
    if output.errors:  # before anything is committed: what a failed step wrote must not be shared
        _fail_requests(lifecycle, step, output, news)
    _commit_progress(lifecycle, step)
    if output.prompt_logprobs:
        _deliver_prompt_logprobs(step, output, news)
    any_ended = bool(output.errors)
    choosers: dict[TokenChooser, None] = {}
    for request, tokens in _sampled_pairs(step, output):
        if request.status is FINISHED:
            continue  # it ran ahead of its end, or was cancelled: the tokens are discarded
        if request in step.foreseen:
            assert tokens == [step.foreseen[request]], (
                f"{request.request_id}: the forced token was not sampled"
            )
            continue
        request.num_placeholders -= 1
        if request.chooser is not None:
            request.chooser.take(request, output.logprobs[request.request_id][0])
            choosers[request.chooser] = None
            continue
        item = EngineCoreOutput(request.parent_id, request.child_index, tokens)
        # told with every token: a stop string may end the answer before the core does
        item.num_cached_tokens = request.num_cached_prompt_tokens
        news.append(item)
        num_before = len(request.token_ids)
        reason = _commit_tokens(request, tokens, now)
        if output.logprobs:
            item.logprobs = output.logprobs.get(request.request_id)
        if reason is not None:
            item.new_token_ids = tokens[: len(request.token_ids) - num_before]
            any_ended = True
            estimator.observe(request)
            finish(lifecycle, request, item, reason, _stop_reason(request, reason))
    if any_ended:
        lifecycle.drop_stopped()
    for chooser in choosers:
        news += chooser.decide(scene)
    return news


def commit_forced(
    lifecycle: Lifecycle, steps_in_flight: Iterable[Step], request: Request, tokens: list[int]
) -> EngineCoreOutput:
    """Commit tokens that must come next, as accepted drafts are: they are known without a step of their own, and the
    next forward takes them all as one chunk.

    If a step in flight samples for the request, its sample is the first of them: the caller forces it by a mask.
    """
    num_before = len(request.token_ids)
    reason = _commit_tokens(request, tokens, lifecycle.clock())
    committed = rest = request.token_ids[num_before:]
    for step in steps_in_flight:
        if request in step.sampled and request not in step.foreseen:
            step.foreseen[request] = committed[0]
            request.num_placeholders -= 1
            rest = committed[1:]
    if request.is_resident and rest:
        lifecycle.appended_ids.setdefault(request.request_id, []).extend(rest)
    item = EngineCoreOutput(request.parent_id, request.child_index, committed)
    if reason is not None:
        finish(lifecycle, request, item, reason, _stop_reason(request, reason))
        lifecycle.drop_stopped()
    return item


def _commit_progress(lifecycle: Lifecycle, step: Step) -> None:
    """The step's KV is in place: blocks that it filled may enter the radix tree."""
    commit = lifecycle.kv.commit
    for request, end in zip(step.requests, step.ends, strict=True):
        request.num_steps_in_flight -= 1
        if request.status is RUNNING:
            request.num_committed_tokens = end
            commit(request)


def _sampled_pairs(step: Step, output: ModelRunnerOutput) -> list[tuple[Request, list[int]]]:
    if not output.errors:
        return list(zip(step.sampled, output.sampled_token_ids, strict=True))
    by_id = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    return [(request, by_id[request.request_id]) for request in step.sampled if request.request_id in by_id]


def _commit_tokens(request: Request, tokens: list[int], now: float) -> FinishReason | None:
    """Append sampled tokens up to the first that ends the request; the reason if one does."""
    token_ids, stop_ids, times = request.token_ids, request.stop_token_ids, request.timeline.token_times
    for token in tokens:
        token_ids.append(token)
        times.append(now)
        if token in stop_ids and request.num_output_tokens > request.sampling_params.min_tokens:
            return FinishReason.STOP
        if len(token_ids) >= request.max_total_tokens:
            return FinishReason.LENGTH
    return None


def _stop_reason(request: Request, reason: FinishReason) -> int | None:
    """The stop token that ended it; None for the model's own end of sequence, and for other reasons."""
    token = request.token_ids[-1]
    return token if reason is FinishReason.STOP and token not in request.eos_token_ids else None


def finish(
    lifecycle: Lifecycle,
    request: Request,
    item: EngineCoreOutput,
    reason: FinishReason,
    stop_reason: int | str | None = None,
    message: str | None = None,
) -> None:
    """End ``request`` and let ``item`` say so."""
    lifecycle.finish(request, reason, stop_reason, message)
    item.finish_reason, item.stop_reason, item.message = reason.value, stop_reason, message
    item.num_cached_tokens = request.num_cached_prompt_tokens
    item.timeline = request.timeline


def _deliver_prompt_logprobs(step: Step, output: ModelRunnerOutput, news: list[EngineCoreOutput]) -> None:
    for request in step.requests:
        entries = output.prompt_logprobs.get(request.request_id)
        if entries and not request.is_finished:
            request.next_prompt_logprob += len(entries)
            news.append(EngineCoreOutput(request.parent_id, request.child_index, prompt_logprobs=entries))


def _fail_requests(
    lifecycle: Lifecycle, step: Step, output: ModelRunnerOutput, news: list[EngineCoreOutput]
) -> None:
    """Requests whose own step failed end alone, with the message."""
    for request in step.requests:
        message = output.errors.get(request.request_id)
        if message is None or request.is_finished:
            continue
        if request.chooser is not None:
            news += request.chooser.end(lifecycle, FinishReason.ERROR, message)
        else:
            item = EngineCoreOutput(request.parent_id, request.child_index)
            item.refusal = output.refusals.get(request.request_id)
            finish(lifecycle, request, item, FinishReason.ERROR, message=message)
            news.append(item)

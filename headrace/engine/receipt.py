"""A request's latency receipt, read from the timelines of its answers."""

from __future__ import annotations

from typing import Any

from headrace.core.timeline import Timeline


def metrics_of(arrival_time: float, timelines: list[Timeline]) -> dict[str, Any]:
    """Times of a finished request in monotonic seconds, under vLLM's names; None where it never got so far.

    Args:
        arrival_time: when the user's side took the request.
        timelines: one for each answer.

    Returns: arrival_time, first_scheduled_time, first_token_time, last_token_time, finished_time, num_preemptions,
        and token_times: for each answer, when each of its tokens was committed.
    """
    token_times = [timeline.token_times for timeline in timelines]
    finished = [timeline.first("FINISHED") for timeline in timelines]
    return {
        "arrival_time": arrival_time,
        "first_scheduled_time": timelines[0].first("RUNNING"),
        "first_token_time": min((times[0] for times in token_times if times), default=None),
        "last_token_time": max((times[-1] for times in token_times if times), default=None),
        "finished_time": max((time for time in finished if time is not None), default=None),
        "num_preemptions": sum(timeline.num_preemptions for timeline in timelines),
        "token_times": token_times,
    }

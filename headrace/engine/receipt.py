"""A request's latency receipt, read from the timelines of its answers."""

from __future__ import annotations

from headrace.core.timeline import Timeline
from headrace.outputs import RequestMetrics


def metrics_of(arrival_time: float, timelines: list[Timeline]) -> RequestMetrics:
    """Times of a finished request.

    Args:
        arrival_time: when the user's side took the request.
        timelines: one for each answer.
    """
    token_times = [timeline.token_times for timeline in timelines]
    finished = [timeline.first("FINISHED") for timeline in timelines]
    return RequestMetrics(
        arrival_time,
        first_scheduled_time=timelines[0].first("RUNNING"),
        first_token_time=min((times[0] for times in token_times if times), default=None),
        last_token_time=max((times[-1] for times in token_times if times), default=None),
        finished_time=max((time for time in finished if time is not None), default=None),
        num_preemptions=sum(timeline.num_preemptions for timeline in timelines),
        token_times=token_times,
    )

"""A listener that writes down what an engine core says, and helpers to drive a client with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.output import EngineCoreOutput, EngineCoreRequest
from headrace.engine.messages import CoreReady, LoadProgress, Refusal, StepNews
from headrace.errors import HeadraceError
from headrace.sampling_params import SamplingParams


class Recorder:
    def __init__(self) -> None:
        self.ready: list[CoreReady] = []
        self.progress: list[LoadProgress] = []
        self.news: list[StepNews] = []
        self.refusals: list[Refusal] = []
        self.deaths: list[HeadraceError] = []

    def on_progress(self, progress: LoadProgress) -> None:
        self.progress.append(progress)

    def on_ready(self, ready: CoreReady) -> None:
        self.ready.append(ready)

    def on_step(self, news: StepNews) -> None:
        self.news.append(news)

    def on_refusal(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def on_death(self, error: HeadraceError) -> None:
        self.deaths.append(error)

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        return [o for news in self.news for o in news.outputs if o.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs(request_id) for token in output.new_token_ids]

    def is_finished(self, request_id: str) -> bool:
        return any(output.finish_reason for output in self.outputs(request_id))


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def core_request(request_id: str, prompt: list[int], max_tokens: int, **params: object) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **params), max_tokens)

"""From a Job to an HTTP answer: submit it, gather or stream its outputs, and let go of it when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.mailbox import Mailbox
from headrace.engine.output_processor import RequestOutputKind
from headrace.observe.metrics import ServingMetrics
from headrace.outputs import RequestOutput
from headrace.serve.connection import until_gone
from headrace.serve.errors import ClientGone, api_error, count_refusal, json_response
from headrace.serve.job import Job, end_of

# A refusal by the engine core comes within a step or two and should be an HTTP status, not an event in a stream.
_STATUS_WAIT_S = 2.0
# Whether a constraint can be compiled is known when it has been.
_COMPILE_WAIT_S = 15.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DIRECT_SEND = "headrace.direct_send"

News = list[tuple[int, RequestOutput]]


async def answer(llm: AsyncLLM, job: Job) -> Response:
    """Run a job. Raises RequestError, EngineDeadError, ApiError before anything was sent."""
    mailbox = await llm.submit(
        job.prompts,
        job.params,
        RequestOutputKind.DELTA if job.is_stream else RequestOutputKind.FINAL_ONLY,
        priority=job.priority,
        clamp_max_tokens=job.clamp_max_tokens,
    )
    try:
        if not job.is_stream:
            outputs = await _gather(mailbox, len(job.prompts))
            return json_response(job.format.body(outputs))
        first: News = []
        with contextlib.suppress(TimeoutError):
            is_constrained = job.params.structured_outputs is not None
            async with asyncio.timeout(_COMPILE_WAIT_S if is_constrained else _STATUS_WAIT_S):
                first = await mailbox.get()
        _check(first)
    except BaseException:
        mailbox.close()
        raise
    return EventStream(mailbox, first, job, llm.metrics)


async def _gather(mailbox: Mailbox, num_prompts: int) -> list[RequestOutput]:
    """All finished outputs, in the prompts' order."""
    outputs: dict[int, RequestOutput] = {}
    while not mailbox.is_done:
        outputs.update(await mailbox.get())
    mailbox.close()
    return [outputs[index] for index in range(num_prompts)]


def _check(news: News) -> None:
    """Raises ApiError 500 if the engine failed on one of these requests already."""
    for _, output in news:
        for part in output.outputs:
            end_of(part)


class EventStream(Response):
    """Writes a stream straight to the connection, all that is new in one piece. A client that reads slowly holds up
    only itself: what it does not take is merged in its mailbox."""

    def __init__(self, mailbox: Mailbox, first: News, job: Job, metrics: ServingMetrics) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._first = first
        self._format = job.format
        self._names = job.names
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; return early if the client leaves."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            # Middleware may add headers above; it has nothing to do with the body, which is sent past it. A task of its
            # own is woken for each token without going down through the coroutines of every layer.
            await asyncio.create_task(self._send_all(scope.get(DIRECT_SEND, send)))
        except ClientGone:
            pass
        finally:
            watcher.cancel()
            self._mailbox.close()

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self._mailbox.fail(ClientGone())

    async def _send_all(self, send: Send) -> None:
        mailbox, form, news = self._mailbox, self._format, self._first
        data = form.opening()
        try:
            while True:
                for index, output in news:
                    data += form.events(index, output)
                if mailbox.is_done:
                    break
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = b""
                news = await mailbox.get()
            data += form.closing()
        except ClientGone:
            raise
        except Exception as error:
            count_refusal(self._metrics, error)
            data += form.failure(self._names.rename(api_error(error)))
        await send({"type": "http.response.body", "body": data, "more_body": False})

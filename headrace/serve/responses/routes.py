"""POST /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.serve.body import decode_body
from headrace.serve.chat_plan import ChatPlan
from headrace.serve.context import ServerContext
from headrace.serve.generation_routes import answer_chat
from headrace.serve.protocol import ChatRequest
from headrace.serve.responses.convert import NAMES, chat_request
from headrace.serve.responses.format import ResponsesFormat
from headrace.serve.responses.protocol import ResponsesRequest


async def create_response(context: ServerContext, request: Request, body: bytes) -> Response:
    """Answer an input."""
    wanted = decode_body(body, ResponsesRequest)

    def make_format(
        chat: ChatRequest, model: str, front_end: FrontEnd, plan: ChatPlan, prompt: ParsedPrompt
    ) -> ResponsesFormat:
        return ResponsesFormat(wanted, model, front_end, plan, prompt)

    return await answer_chat(context, chat_request(wanted), len(body), make_format, NAMES)

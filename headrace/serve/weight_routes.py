"""The route of the model's weights: POST /weights/update."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.engine_core import REQUESTS_UNFINISHED
from headrace.errors import CheckpointError, ConfigError, DeviceMemoryError, RequestError
from headrace.serve.body import decode_body
from headrace.serve.context import ServerContext
from headrace.serve.errors import ApiError, bad_request, json_response


class UpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which weights: a folder or .gguf file on the server's machine; left out: those loaded last, as they are now."""

    model: str | None = None


async def update_weights(context: ServerContext, request: Request, body: bytes) -> Response:
    """Replace the running weights; answers when requests are computed with the new ones. The served name stays."""
    wanted = decode_body(body, UpdateBody) if body.strip() else UpdateBody()
    await context.admit()
    try:
        await context.llm.update_weights(wanted.model)
    except (CheckpointError, ConfigError, DeviceMemoryError) as error:
        context.llm.check_alive()  # an engine that never came up says so
        raise bad_request(str(error), "model") from error
    except RequestError as error:
        if error.code != REQUESTS_UNFINISHED:
            raise
        raise ApiError(409, error.message, code=error.code, headers={"Retry-After": "1"}) from error
    return json_response({"is_updated": True})

"""OpenAI's error objects, and which status each of our errors has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.errors import CapacityError, EngineDeadError, HeadraceError, RequestError
from headrace.observe.metrics import ServingMetrics

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 2000
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status; ``param`` names the field at fault, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def shown_message(self) -> str:
        """The message as it may be sent. Long ones, which may quote the request, are cut."""
        message = self.message.encode("utf-8", "replace").decode()
        return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + " …"

    @property
    def kind(self) -> str:
        """The type that OpenAI's error object has."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        message = self.shown_message()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, *, code: str = "invalid_value") -> ApiError:
    """The refusal of a client's mistake in the field ``param``: status 400."""
    return ApiError(400, message, param=param, code=code)


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


def api_error(error: Exception) -> ApiError:
    """The refusal that ``error`` becomes. What we did not raise on purpose is logged and stays vague."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError) and error.code == "queue_full":
        return ApiError(429, error.message, code=error.code, headers={"Retry-After": "1"})
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return ApiError(status, error.message, param=error.param, code=error.code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, HeadraceError):  # the model cannot be loaded
        return ApiError(503, str(error), code="engine_not_loaded")
    logger.error("a request failed by a fault of the server", exc_info=error)
    return ApiError(500, f"the server failed on this request ({type(error).__name__})", code="internal_error")


def count_refusal(metrics: ServingMetrics, error: Exception) -> None:
    """Count a request for an answer that ended with ``error``, if it was refused: by our checks, the engine's or the
    core's. What the engine failed on has answers that are counted as ended, and a client that left is no refusal."""
    if isinstance(error, ApiError | RequestError):
        refusal = api_error(error)
        if refusal.status != 500:
            metrics.count_refusal(refusal.code or refusal.kind)


def error_response(error: Exception, body_of: Callable[[ApiError], Any] = ApiError.body) -> Response:
    """An HTTP answer with the error object, by default OpenAI's."""
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # nobody will see it
    refusal = api_error(error)
    return json_response(body_of(refusal), refusal.status, refusal.headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An HTTP answer of JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")

"""The ASGI application: a table of routes, each with its API's error objects for whatever goes wrong."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.serve import cache_routes, generation_routes, probe_routes, token_routes, weight_routes
from headrace.serve.answering import DIRECT_SEND
from headrace.serve.body import read_body
from headrace.serve.connection import while_connected
from headrace.serve.context import ServerContext
from headrace.serve.errors import ApiError, count_refusal, error_response
from headrace.serve.messages import routes as message_routes
from headrace.serve.messages.errors import error_body as message_error_body
from headrace.serve.query import check_query
from headrace.serve.responses import routes as response_routes

Getter = Callable[[ServerContext, Request], Awaitable[Response]]
Poster = Callable[[ServerContext, Request, bytes], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

# Probes and metrics are read by machines that have no key; what they tell is not secret.
OPEN_ROUTES: dict[str, Getter] = {
    "/health": probe_routes.show_health,
    "/health/ready": probe_routes.show_health,
    "/health/live": probe_routes.show_liveness,
    "/ping": probe_routes.show_health,
    "/version": probe_routes.show_version,
    "/metrics": probe_routes.show_metrics,
}
GET_ROUTES: dict[str, Getter] = {
    "/cache": cache_routes.show_cache,
    "/v1/models": probe_routes.list_models,
    "/v1/models/{model:path}": probe_routes.show_model,
}
# Query parameters of the server's own routes that take some.
QUERY_PARAMETERS: dict[str, tuple[str, ...]] = {"/cache": ("max_nodes",)}
# Their clients send parameters of their own accord (?beta=true, ?api-version=…), which change no answer here.
CLIENT_APIS = "/v1/"
# Requests for answers: those that are refused are counted.
ANSWER_ROUTES: dict[str, Poster] = {
    "/v1/completions": generation_routes.create_completion,
    "/v1/chat/completions": generation_routes.create_chat_completion,
    "/v1/responses": response_routes.create_response,
    "/v1/messages": message_routes.create_message,
}
POST_ROUTES: dict[str, Poster] = {
    **ANSWER_ROUTES,
    "/v1/messages/count_tokens": message_routes.count_tokens,
    "/cache/reset": cache_routes.reset_cache,
    "/cache/explain": cache_routes.explain_cache,
    "/cache/pin": cache_routes.pin_prefix,
    "/cache/unpin": cache_routes.unpin_prefix,
    "/weights/update": weight_routes.update_weights,
    "/tokenize": token_routes.tokenize,
    "/detokenize": token_routes.detokenize,
}
# Routes of other APIs than OpenAI's have error objects of their own.
ERROR_BODIES: dict[str, Callable[[ApiError], Any]] = {
    "/v1/messages": message_error_body,
    "/v1/messages/count_tokens": message_error_body,
}


def build_app(context: ServerContext) -> ASGIApp:
    """The application over one engine."""
    inner = _build_router(context)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        await inner(scope, receive, send)

    return app


def _build_router(context: ServerContext) -> Starlette:
    routes = [
        Route(path, _get(context, handler, path)) for path, handler in {**OPEN_ROUTES, **GET_ROUTES}.items()
    ]
    routes += [
        Route(path, _post(context, handler, path), methods=["POST"]) for path, handler in POST_ROUTES.items()
    ]
    router = Starlette(
        routes=routes, middleware=_middleware(context), exception_handlers={HTTPException: _on_http_error}
    )
    router.router.redirect_slashes = False  # a client that posts to the wrong path is told so
    return router


def _get(context: ServerContext, handler: Getter, path: str) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            if path not in OPEN_ROUTES:
                _check_key(context, request)
            _check_query(request, path)
            return await handler(context, request)
        except Exception as error:
            return error_response(error)

    return endpoint


def _post(context: ServerContext, handler: Poster, path: str) -> Endpoint:
    error_body = ERROR_BODIES.get(path, ApiError.body)

    async def endpoint(request: Request) -> Response:
        try:
            _check_key(context, request)
            _check_query(request, path)
            body = await read_body(request, context.config.max_body_bytes)
            return await while_connected(request.receive, _run(context, handler, request, body))
        except Exception as error:
            if path in ANSWER_ROUTES:
                count_refusal(context.llm.metrics, error)
            return error_response(error, error_body)

    return endpoint


async def _run(context: ServerContext, handler: Poster, request: Request, body: bytes) -> Response:
    return await handler(context, request, body)


def _check_query(request: Request, path: str) -> None:
    if not path.startswith(CLIENT_APIS):
        check_query(request, QUERY_PARAMETERS.get(path, ()))


def _check_key(context: ServerContext, request: Request) -> None:
    key = context.config.api_key
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if not scheme:  # as Anthropic's clients send it
        scheme, given = "bearer", request.headers.get("x-api-key", "")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        raise ApiError(
            401,
            "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _middleware(context: ServerContext) -> list[Middleware]:
    origins = context.config.cors_origins
    if origins is None:
        return []
    allowed = [origin.strip() for origin in origins.split(",")]
    return [
        Middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["GET", "POST"], allow_headers=["*"])
    ]


async def _on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed on {path}; allowed: {allowed}"
    else:
        message = f"there is no {request.method} {path} here"
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    return error_response(ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))

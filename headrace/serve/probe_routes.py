"""GET routes: models, health, version, metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.errors import HeadraceError, RequestError
from headrace.observe.metrics import render_metrics
from headrace.serve.context import ServerContext
from headrace.serve.errors import json_response


async def list_models(context: ServerContext, request: Request) -> Response:
    """The one model there is, as a page of Anthropic's API, too."""
    card = await _card(context)
    page = {"has_more": False, "first_id": card["id"], "last_id": card["id"]}
    return json_response({"object": "list", "data": [card], **page})


async def show_model(context: ServerContext, request: Request) -> Response:
    """One model by its name. Raises RequestError (404)."""
    wanted = request.path_params["model"]
    await context.check_model(wanted)
    return json_response(await _card(context))


async def _card(context: ServerContext) -> dict[str, Any]:
    """The model's object: OpenAI's fields and Anthropic's side by side, which have no name in common."""
    name = await context.model_name()
    return {
        "id": name,
        "object": "model",
        "created": context.start_time,
        "owned_by": "headrace",
        "root": context.llm.config.model.model,
        "parent": None,
        "max_model_len": await context.max_model_len(),
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.start_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
    }


async def show_health(context: ServerContext, request: Request) -> Response:
    """200 when a request would be answered now; 503 with the reason when not."""
    state = _dead(context)
    if state is None and context.is_draining:
        state = {"status": "draining"}
    if state is None and not context.llm.is_ready:
        progress = context.llm.progress
        state = {"status": "loading", "stage": progress.stage, "share": f"{progress.share:.2f}"}
    return json_response(state or {"status": "ok"}, 503 if state else 200)


async def show_liveness(context: ServerContext, request: Request) -> Response:
    """200 unless the engine is dead, loading included: what a supervisor restarts on."""
    dead = _dead(context)
    return json_response(dead or {"status": "alive"}, 503 if dead else 200)


def _dead(context: ServerContext) -> dict[str, str] | None:
    try:
        context.llm.check_alive()
    except HeadraceError as error:
        return {"status": "dead", "error": str(error)}
    return None


async def show_version(context: ServerContext, request: Request) -> Response:
    """The package's version."""
    return json_response({"version": __version__})


async def show_metrics(context: ServerContext, request: Request) -> Response:
    """Prometheus text."""
    try:
        name = await context.model_name()
    except (HeadraceError, RequestError):
        name = context.llm.config.model.model
    text, content_type = render_metrics(context.llm.metrics, name)
    return Response(text, media_type=None, headers={"content-type": content_type})

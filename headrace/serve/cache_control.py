"""``cache_control`` of requests, as Anthropic's API spells it: which prompts stay in the cache, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.serve.body import refuse_unknown
from headrace.serve.context import ServerContext, tokenizer_of
from headrace.serve.errors import bad_request

TTLS_S = {"5m": 300.0, "1h": 3600.0}
# Where a request may carry it, in any API. What is not here belongs to users: schemas, arguments, template variables.
_CARRIERS = ("messages", "system", "tools", "content", "tool_calls", "function")


def seconds_of(ttl: Any, where: str, param: str) -> float:
    """Of a time to live by name. Raises ApiError 400."""
    if not isinstance(ttl, str) or ttl not in TTLS_S:
        raise bad_request(f"{where} must be {' or '.join(map(repr, TTLS_S))}; got {ttl!r:.100}", param)
    return TTLS_S[ttl]


def control_in(**fields: Any) -> Any:
    """The ``cache_control`` of longest life in these fields of a request, objects inside them included, or None.

    Raises: ApiError 400 for one that is wrong, by its path.
    """
    found: list[tuple[float, Any]] = []
    pending: list[tuple[str, Any]] = [("", fields)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, dict):
            prefix = f"{path}." if path else ""
            control = item.get("cache_control")
            if control is not None:
                found.append((_ttl_of(control, f"{prefix}cache_control"), control))
            pending += [(prefix + name, part) for name, part in item.items() if name in _CARRIERS]
        elif isinstance(item, list):
            pending += [(f"{path}[{index}]", part) for index, part in enumerate(item)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def without_controls(item: Any) -> Any:
    """The same part of a request without ``cache_control``, which templates must not see: it would be text of the
    prompt, and another time to live another prompt."""
    if isinstance(item, list):
        return [without_controls(part) for part in item]
    if not isinstance(item, dict):
        return item
    return {
        name: without_controls(part) if name in _CARRIERS else part
        for name, part in item.items()
        if name != "cache_control"
    }


def _ttl_of(control: Any, where: str) -> float:
    """Seconds that a ``cache_control`` object asks for. Raises ApiError 400."""
    if not isinstance(control, dict):
        raise bad_request(
            f"{where} must be {{'type': 'ephemeral', 'ttl': {' or '.join(map(repr, TTLS_S))}}}; got {control!r:.100}",
            where,
        )
    refuse_unknown(control, ("type", "ttl"), where)
    if control.get("type") != "ephemeral":
        raise bad_request(f"{where}.type must be 'ephemeral'; got {control.get('type')!r:.100}", where)
    ttl = control.get("ttl")
    return seconds_of("5m" if ttl is None else ttl, f"{where}.ttl", where)


async def pin_if_asked(context: ServerContext, control: Any, prompts: Sequence[ParsedPrompt]) -> None:
    """Pin prompts that are about to be computed, if ``control`` (``cache_control``) asks for it.

    Raises: ApiError for a wrong one, RequestError for a prompt that cannot be computed.
    """
    if control is None:
        return
    ttl_s = _ttl_of(control, "cache_control")
    front_end = await context.llm.front_end()
    if context.llm.config.cache.enable_prefix_caching:
        checked = [with_ids(prompt, front_end) for prompt in prompts]
        for prompt in checked:
            await call_about(context, "pin", prompt, ttl_s=ttl_s)


def with_ids(prompt: ParsedPrompt, front_end: FrontEnd) -> ParsedPrompt:
    """The prompt with its token ids. Raises RequestError for one that no request may have, as the engine would."""
    ids = prompt.token_ids
    if ids is None:
        ids = tokenizer_of(front_end).encode(prompt.text or "")
    front_end.inputs.check_prompt(ids)
    return ParsedPrompt(prompt.text, ids, prompt.cache_salt)


async def call_about(
    context: ServerContext, action: str, prompt: ParsedPrompt, **more: Any
) -> dict[str, Any]:
    """Do one of ``CacheAdmin``'s actions that are about a prompt, whose ids are known. Raises RequestError."""
    arguments = {"token_ids": prompt.token_ids, "namespace": prompt.cache_salt, **more}
    return await context.llm.call_cache(action, **arguments)

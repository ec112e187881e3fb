"""Tools in words, for chat templates that know none: how they are told of, and how calls and results are written.

    # Tools

    You may call functions to help the user. These are their signatures, one JSON object a line:
    <tools>
    {"type": "function", "function": {"name": …, "description": …, "parameters": …}}
    </tools>

    To call a function, write its name and its arguments like this:
    <tool_call>
    {"name": "function_name", "arguments": {"argument": "value"}}
    </tool_call>
    The results come back between <tool_response> and </tool_response>.

joins the system message (or the first user message where the template takes no system message). Earlier calls of the
conversation become text of the assistant in the same format, and results a message of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.serve.tools.tool_format import ToolFormat
from headrace.tokenizer.chat_messages import normalise_messages

_DEFAULT_SYSTEM = "You are a helpful assistant."
_RESULT_ROLES = ("tool", "function")


def with_tools_in_words(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: ToolFormat,
    takes_system: bool = True,
) -> list[dict[str, Any]]:
    """The messages with nothing left in them that the template would have to know.

    Args:
        tools: those that the model is to be told of, as the request has them.
        takes_system: whether the template accepts a system message.

    Raises: RequestError for malformed messages.
    """
    plain = _with_results(_with_call_text(normalise_messages(messages), form))
    if not tools:
        return plain
    text = tools_prompt(tools, form)
    first = plain[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *plain[1:]]
    if takes_system:
        return [{"role": "system", "content": f"{_DEFAULT_SYSTEM}\n\n{text}"}, *plain]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *plain[1:]]


def tools_prompt(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """What a model is told of its tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = form.render([("function_name", {"argument": "value"})])
    return (
        "# Tools\n\nYou may call functions to help the user. These are their signatures, one JSON object a line:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        f"To call a function, write its name and its arguments like this:\n{example}\n"
        "The results come back between <tool_response> and </tool_response>."
    )


def _with_call_text(messages: list[dict[str, Any]], form: ToolFormat) -> list[dict[str, Any]]:
    result = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            texts = [message["content"]] if message["content"] else []
            texts.append(_call_text([call["function"] for call in calls], form))
            message = {"role": message["role"], "content": "\n".join(texts)}
        result.append(message)
    return result


def _call_text(functions: list[Mapping[str, Any]], form: ToolFormat) -> str:
    """Calls as the model would write them; arguments that are no JSON object, as they came."""
    if all(isinstance(function["arguments"], dict) for function in functions):
        return form.render([(str(function.get("name")), function["arguments"]) for function in functions])
    return "\n".join(f"{function.get('name')}: {function['arguments']}" for function in functions)


def _with_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as messages of the user, those that follow one another in one message."""
    result: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] in _RESULT_ROLES
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                result[-1]["content"] += "\n" + text
            else:
                result.append({"role": "user", "content": text})
        else:
            result.append(message)
        was_result = is_result
    return result

"""ChatTemplate: a model's Jinja template, rendered in a sandbox with limits on time and size."""

from __future__ import annotations

import threading
from typing import Any

from headrace.errors import RequestError

_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class ChatTemplate:
    """One template source, compiled on first use."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._compiled: Any = None
        self._lock = threading.Lock()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        add_generation_prompt: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        Raises:
            RequestError: the template does not parse, refuses the messages, fails, or goes past a limit.
        """
        context = dict(variables or {})
        for name in _OWN_VARIABLES:
            if name in context:
                raise RequestError(
                    f"the template variable '{name}' is set by the request itself; leave it out of "
                    "chat_template_kwargs",
                    param="chat_template_kwargs",
                )
        context |= {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run(context)

    def render_to_continue(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text up to the end of the last message's content, for the model to go on from there.

        A mark is put behind the content to find its end; what comes back is a beginning of the unmarked prompt.

        Raises:
            RequestError: as ``render``, or the template does not print the last message's content as it is.
        """
        last = messages[-1]
        if last.get("tool_calls"):
            raise RequestError(
                "a last message with tool calls cannot be continued", param="continue_final_message"
            )
        whole = self.render(messages, tools=tools, documents=documents, variables=variables)
        mark = "ContinueFromHere"
        while mark in whole:
            mark += "0"
        marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
        text = self.render(marked, tools=tools, documents=documents, variables=variables)
        beginning, found, _ = text.rpartition(mark)
        if found and not whole.startswith(beginning):
            # The template strips the content, which the mark shields from it.
            beginning = beginning.rstrip()
        if not found or not whole.startswith(beginning):
            raise RequestError(
                "the chat template does not print the last message's content as it is, so it cannot be continued; "
                "set continue_final_message to false",
                param="continue_final_message",
            )
        return beginning

    def _run(self, context: dict[str, Any]) -> str:
        from headrace.tokenizer.template_sandbox import compile_template, render_template

        if self._compiled is None:
            with self._lock:
                self._compiled = compile_template(self._source)
        return render_template(self._compiled, context)

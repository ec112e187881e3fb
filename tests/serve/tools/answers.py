"""Texts as models write them, and readers for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from headrace.serve.tools.answer_parser import AnswerParser
from headrace.serve.tools.events import Event, ParsedAnswer, merged
from headrace.serve.tools.reasoning import REASONING_PARSERS, ReasoningSplitter
from headrace.serve.tools.registry import FORMATS
from headrace.serve.tools.tool_parser import CallRules

NAMES = ("get_weather", "get_time", "f", "ns.tool-2")

# One long text for each thing that a format can do; splits and malformed variants are made of these.
TEXTS: dict[str, list[str]] = {
    "hermes": [
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\\"is", "n": [1, -2.5e3]}}\n'
        '</tool_call>\n<tool_call>{"arguments": {"zone": null}, "id": 3, "name": "get_time"}</tool_call>\nDone <b>.',
        '<tool_call>{"name": "f", "arguments": '
        '"{\\"x\\": \\"\\\\u00e9\\\\ud83d\\\\ude00\\", \\"y\\": {}}"}</tool_call>',
        '  <tool_call>{"name": "f"}</tool_call> \n <tool_call>\n{"name": "no", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"text": "two\nlines\tand <tool_call> inside"}}',
    ],
    "llama3_json": [
        ' {"name": "get_weather", "parameters": {"city": "Paris", "d": {"e": [true, false, null]}}}; '
        '{"name": "get_time", "parameters": {}}',
        'Hm. <|python_tag|>{"type": "function", "name": "f", "parameters": {"x": "1"}}',
        '{"answer": [1, 2]} is JSON, not a call',
        '{"function": "f", "parameters": null} then words',
    ],
    "mistral": [
        'Sure.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}, '
        '{"name": "get_time", "arguments": {"a": ["]", "}"]}}] after',
        '[TOOL_CALLS]get_weather{"city": "Oslo"}[TOOL_CALLS]get_time[CALL_ID]abc123456[ARGS]{"zone": "UTC"}',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"deep": {"er": {"est": [[[]]]}}}}]',
    ],
    "deepseek": [
        "I'll check.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Tokyo", "s": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "é"}<｜tool▁call▁end｜><｜tool▁calls▁end｜> bye',
    ],
    "gemma": [
        "<start_function_call>call:get_weather{city:<escape>São Paulo, {x}<escape>,days:[1,2.5],ok:true}"
        "<end_function_call><start_function_call>call:get_time{}<end_function_call>",
        'Wait: <|tool_call>call:f{a:<|"|>q"uo\\te\n<|"|>, "b" : {c:null, d:[<|"|>x<|"|>]}}<tool_call|> end',
    ],
    "pythonic": [
        "[get_weather(city='Par\\'is', n=[1, (2, .5)], flag=True), get_time(zone=None, d={'a': \"b\\n\", \"c\": -1})]",
        "<|python_start|>[f(x=+1.), ns.tool-2()]<|python_end|>",
        "[1, 2, f(x)] is a list",
        " [f(text='''')]",
    ],
    "tool_code": [
        "I will.\n```tool_code\nget_weather(city='Rome')\nprint(get_time(zone='\\u00e9\\x41'))\n```\nthen more",
        "```tool_code\n[f(x=1), f(x=[])]\n```",
    ],
}
REASONED = [
    "<think>\nI should call. <tool_call> no\n\n</think>\n\nText {}",
    "\n<think></think>{}",
    "no thinking {}",
    "<think>never ends {}",
]

Read = Callable[[Sequence[str]], list[Event]]


def ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"id{next(counter)}"


def reader(
    form: str,
    tags: str | None = None,
    is_cut: bool = False,
    max_calls: int | None = None,
    inside: bool = False,
    only_calls: bool = False,
) -> Read:
    """A function from an answer's pieces to its events."""

    def read(pieces: Sequence[str]) -> list[Event]:
        splitter = ReasoningSplitter(REASONING_PARSERS[tags], inside) if tags else None
        rules = CallRules(NAMES, ids(), max_calls, only_calls)
        parser = AnswerParser(splitter, FORMATS[form].parser(rules))
        events: list[Event] = []
        for piece in pieces:
            events += parser.feed(piece)
        return merged(events + parser.finish(is_cut))

    return read


def answer(events: Iterable[Event]) -> ParsedAnswer:
    whole = ParsedAnswer()
    whole.add(events)
    return whole

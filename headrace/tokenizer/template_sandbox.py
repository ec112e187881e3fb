"""The sandbox chat templates run in: no way to Python's internals, bounded time, bounded size.

Templates come with models from anywhere. Jinja's immutable sandbox keeps them from attributes and mutation; on top,
loops, calls, filters and joins are counted against a budget, so that a template which loops or grows for ever ends
with an error. The environment offers what transformers offers: trimmed blocks, loop controls, the ``generation``
block, ``tojson`` without HTML escapes, ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.errors import RequestError

MAX_RENDER_CPU_S = 2.0
MAX_STEPS = 2_000_000
MAX_TEXT_CHARS = 400_000_000
MAX_WIDTH = 1_000_000

# Functions whose number arguments are widths of texts that they make.
_WIDENING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "format"}
)
_LONG_NUMBER = re.compile(r"\d{7,}")


class TemplateLimitError(jinja2.TemplateError):
    """A template went past a limit of the sandbox."""


class RenderBudget:
    """What is left of one rendering's time, steps and text."""

    def __init__(self) -> None:
        self._cpu_deadline_s = time.thread_time() + MAX_RENDER_CPU_S
        self._next_check_s = time.perf_counter() + 0.1
        self._steps = 0
        self._chars = 0

    def step(self, num_chars: int = 0) -> None:
        """Counts one unit of work and the text it adds."""
        self._steps += 1
        self._chars += num_chars
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"the template takes more than {MAX_STEPS} steps")
        if self._chars > MAX_TEXT_CHARS:
            raise TemplateLimitError(f"the template makes more than {MAX_TEXT_CHARS} characters")
        # The thread's own CPU time is what counts, but the wall clock is ten times cheaper to read.
        now_s = time.perf_counter()
        if now_s > self._next_check_s:
            self._next_check_s = now_s + 0.05
            if time.thread_time() > self._cpu_deadline_s:
                raise TemplateLimitError(f"the template takes longer than {MAX_RENDER_CPU_S:g} seconds")


_budget: ContextVar[RenderBudget | None] = ContextVar("chat_template_budget", default=None)


def _step(num_chars: int = 0) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.step(num_chars)


def compile_template(source: str) -> jinja2.Template:
    """Compiles a template for ``render_template``.

    Raises:
        RequestError: it does not parse.
    """
    environment = _SandboxedEnvironment()
    try:
        tree = _Metering().visit(environment.parse(source))
        code = environment.compile(tree)
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise RequestError(
            f"the chat template does not parse{line}: {error}", param="chat_template"
        ) from error
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def render_template(template: jinja2.Template, context: dict[str, Any]) -> str:
    """Renders within the limits.

    Raises:
        RequestError: the template raised an error of its own or made one, or went past a limit.
    """
    token = _budget.set(RenderBudget())
    try:
        return "".join(template.generate(context))
    except jinja2.exceptions.SecurityError as error:
        raise RequestError(
            f"the chat template is not allowed to do this: {error}", param="messages"
        ) from error
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error
    except RecursionError as error:
        raise RequestError("the chat template calls itself too deeply", param="messages") from error
    except MemoryError as error:
        raise RequestError("the chat template needs too much memory", param="messages") from error
    # A template can run into any error of the methods and operators it uses on the messages.
    except Exception as error:
        raise RequestError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    finally:
        _budget.reset(token)


class _SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with calls, filters, joins and printed values counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_count_printed,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters["_metered_loop"] = _metered_loop
        self.filters["_metered_join"] = _metered_join
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _SafeNamespace,
        }
        del self.globals["lipsum"]

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from a template, counted; widths that would make huge texts are refused."""
        _step()
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and getattr(method, "__name__", "") in _WIDENING:
            _check_widths((owner, *args, *kwargs.values()))
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator that can make something large."""
        if operator == "+":
            _step(_text_length(left) + _text_length(right))
        elif operator == "%" and isinstance(left, str):
            _check_widths((left, *(right if isinstance(right, tuple) else (right,))))
        elif operator == "*":
            sizes = [_text_length(side) or (side if isinstance(side, int) else 1) for side in (left, right)]
            if _text_length(left) or _text_length(right):
                _step(max(sizes[0] * sizes[1], 0))
        elif operator == "**" and (not isinstance(right, (int, float)) or abs(right) > 64):
            raise TemplateLimitError(f"the exponent {right!r} is above 64")
        return super().call_binop(context, operator, left, right)


class _Metering(NodeTransformer):
    """Rewrites loops and text joins so that they pass through counting filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filter(node.iter, "_metered_loop", [nodes.Const(num_chars)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_metered_join", [])


def _filter(node: nodes.Node, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, args, [], None, None, lineno=node.lineno)


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks an assistant's words for training; here it prints its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """Jinja's namespace without names that start with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")
        super().__setitem__(name, value)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _step()
        if name in _WIDENING:
            _check_widths((*args, *kwargs.values()))
        return _counted(function(*args, **kwargs))

    return counted


def _metered_loop(items: Iterable[Any], num_chars: int) -> Iterator[Any]:
    for item in items:
        _step(num_chars)
        yield item


def _metered_join(items: list[Any]) -> str:
    texts = [str(item) for item in items]
    _step(sum(map(len, texts)))
    return "".join(texts)


def _count_printed(value: Any) -> Any:
    _step(len(value) if isinstance(value, str) else 0)
    return value


def _counted(value: Any) -> Any:
    if isinstance(value, str):
        _step(len(value))
    return value


def _text_length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _check_widths(values: Iterable[Any]) -> None:
    """Refuses widths above the limit, given as numbers or written inside a short format."""
    for value in values:
        is_wide = isinstance(value, int) and abs(value) > MAX_WIDTH
        if is_wide or (isinstance(value, str) and len(value) < 200 and _LONG_NUMBER.search(value)):
            raise TemplateLimitError(f"a width in {value!r} is above {MAX_WIDTH}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

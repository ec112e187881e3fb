"""The sandbox chat templates run in: no way to Python's internals, bounded time, bounded size.

Templates come with models from anywhere. Jinja's immutable sandbox keeps them from attributes and mutation; on top,
loops, calls, filters, joins and printed values are counted against a budget (``template_budget``), so that a template
which loops or grows for ever ends with an error. The environment offers what transformers offers: trimmed blocks,
loop controls, the ``generation`` block, ``tojson`` without HTML escapes, ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
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
from headrace.tokenizer import template_budget as budget

_WIDENING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDENING_FILTERS = frozenset({"center", "indent", "wordwrap", "batch", "slice"})
_TEXT_FILTERS = frozenset(
    {"tojson", "string", "pprint", "urlencode", "xmlattr", "escape", "e", "forceescape"}
)


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
    try:
        with budget.render_budget():
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


class _SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with calls, filters, operators, joins and printed values counted."""

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
        self.filters |= {"_metered_loop": _metered_loop, "_metered_join": _metered_join}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _SafeNamespace,
        }
        del self.globals["lipsum"]

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from a template, counted; string methods that can make huge texts are checked first."""
        budget.step()
        method = getattr(__obj, "__wrapped__", __obj)
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            values = (*args, *kwargs.values())
            if name in _WIDENING_METHODS:
                budget.check_widths(values)
                if name == "expandtabs":
                    budget.step(text.count("\t") * max((v for v in values if isinstance(v, int)), default=8))
            elif name == "translate":
                table = values[0] if values and isinstance(values[0], dict) else {}
                budget.step(
                    len(text) * max((len(v) for v in table.values() if isinstance(v, str)), default=1)
                )
            elif name in ("format", "format_map"):
                budget.check_format(text, values)
            elif name in ("replace", "join"):
                _check_growth(name, text, args)
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator that can make something large."""
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            budget.step(budget.size(left) + budget.size(right))
        elif operator == "%" and isinstance(left, str):
            budget.check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            budget.check_product(left, right)
        elif operator == "**":
            budget.check_power(left, right)
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
    # Some filters get Jinja's own objects before the value; none of those is a text or a container.
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget.step()
        values = [*args, *kwargs.values()]
        if name in _WIDENING_FILTERS:
            budget.check_widths(values)
            if name == "indent":
                _count_indent(*args, **kwargs)
            elif name == "wordwrap":
                _count_wrap(*args, **kwargs)
        elif name in _TEXT_FILTERS:
            budget.count_text(values)
        elif name == "format":
            budget.check_format(str(args[0]), values[1:])
        elif name in ("replace", "join"):
            _check_growth(name, *_text_and_rest(name, args, kwargs))
        return _counted(function(*args, **kwargs))

    return counted


def _count_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    budget.count_indent(str(text), width)


def _count_wrap(
    environment: Any,
    text: Any,
    width: int = 79,
    break_long: Any = True,
    wrapstring: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    budget.count_wrap(str(text), width, "\n" if wrapstring is None else str(wrapstring))


def _text_and_rest(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """The filter's arguments in the order of the string method's: both filters get Jinja's context first."""
    if name == "join":
        separator = args[2] if len(args) > 2 else kwargs.get("d", "")
        return str(separator), args[1:2]
    return str(args[1]), (*args[2:], *kwargs.values())


def _check_growth(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Counts what ``replace`` or ``join`` will make."""
    if name == "replace" and len(args) >= 2:
        budget.count_repeats(str(args[1]), text.count(str(args[0])))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        budget.count_repeats(text, len(args[0]))
        budget.count_text(args[0])


def _metered_loop(items: Iterable[Any], num_chars: int) -> Iterator[Any]:
    for item in items:
        budget.step(num_chars)
        yield item


def _metered_join(items: list[Any]) -> str:
    budget.count_text(items)
    return "".join(map(str, items))


def _count_printed(value: Any) -> Any:
    budget.count_text(value)
    return value


def _counted(value: Any) -> Any:
    if isinstance(value, str):
        budget.step(len(value))
    return value


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

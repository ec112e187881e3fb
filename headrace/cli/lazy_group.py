"""LazyGroup: a command group that imports a command's module only when that command runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

HELP_WIDTH = 110
CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": HELP_WIDTH,
}


class SectionedCommand(TyperCommand):
    """A command whose help lists its options in sections, by their help panel; long names are never cut."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section a panel, the command's own options first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            own = "Arguments" if param.param_type_name == "argument" else "Options"
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or own, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class LazyGroup(TyperGroup):
    """Lists commands from a table of strings, so that ``headrace --help`` imports none of them."""

    table: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, help_line) in self.table.items():
            self.add_command(TyperCommand(name, help=help_line))  # a stand-in for lists and suggestions

    @classmethod
    def of(cls, table: Mapping[str, tuple[str, str]]) -> type[LazyGroup]:
        """A group over ``{name: ("module:function", one line of help)}``."""
        return type("CommandTable", (cls,), {"table": table})

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the table's order."""
        return list(self.table)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command, its module imported now."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, self._load(name) if stand_in is not None and name else stand_in, rest

    def _load(self, name: str) -> Any:
        module, function = self.table[name][0].split(":")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        run = getattr(importlib.import_module(module), function)
        kind = getattr(run, "command_class", SectionedCommand)
        app.command(name, cls=kind, context_settings=CONTEXT_SETTINGS)(run)
        return typer.main.get_command(app)

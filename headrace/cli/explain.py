"""``headrace explain``: every effective setting, where it came from and why."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from headrace.cli.effective_settings import EffectiveSetting, effective_settings
from headrace.cli.engine_options import EngineSettings, engine_options


@engine_options
def explain(
    settings: EngineSettings,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Print every effective setting: its value, where it came from and why. Reads no weights."""
    rows = effective_settings(settings)
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    else:
        sys.stdout.write(as_text(rows))


def as_text(rows: list[EffectiveSetting]) -> str:
    """One line a setting, in aligned columns, the sections apart."""
    table = [(f"  {row.name}", _value(row), row.origin) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines: list[str] = []
    for index, (row, cells) in enumerate(zip(rows, table, strict=True)):
        if index == 0 or row.section != rows[index - 1].section:
            lines.append(f"{row.section}:")
        columns = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*columns, row.why]))
    return "\n".join(lines) + "\n"


def _value(row: EffectiveSetting) -> str:
    if row.value is None:
        return "-"
    if isinstance(row.value, bool):
        return "on" if row.value else "off"
    return str(row.value)

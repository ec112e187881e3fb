"""Configuration files: YAML, sections of settings. What sections there are is for others to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


def read_sections(path: str | Path) -> dict[str, dict[str, Any]]:
    """{section: {setting: value}} of a file; {} for an empty one.

    Raises: ConfigError when it cannot be read, is no mapping of sections, or has a name twice.
    """
    import yaml

    try:
        with Path(path).open(encoding="utf-8") as file:  # whose name YAML's errors give
            nested = yaml.load(file, Loader=_loader()) or {}
    # Text that is not UTF-8 and dates that do not exist are ValueErrors, lists as keys TypeErrors.
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read configuration {str(path)!r}: {error}") from error
    if not isinstance(nested, dict):
        raise ConfigError(f"configuration {str(path)!r} must be a mapping of sections; got {nested!r}")
    return nested


def _loader() -> Any:
    """YAML's safe loader; of two values under one name it would take the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            for index, name in enumerate(names):
                if name in names[:index]:
                    place = node.value[index][0].start_mark
                    raise ValueError(f"line {place.line + 1} has the name {name!r} a second time")
            return dict(super().construct_mapping(node, deep))

    return Loader

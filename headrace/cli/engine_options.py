"""Command-line flags made from the configuration's sections, and what a command gets of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.config import EngineConfig, option_owners
from headrace.errors import ConfigError

_MODEL_HELP = "Hugging Face folder or id, .gguf file, or packaged model name (default smollm2)"


@dataclass(frozen=True)
class EngineSettings:
    """The engine's configuration, and where each value came from.

    origins: {flat option name: "--block-size" or "settings.yaml"}; options left out have their default.
    """

    config: EngineConfig
    origins: dict[str, str]


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(settings: EngineSettings, ...)`` the MODEL argument, ``--config`` and one flag a setting.

    The command's own parameters come first in the help; the settings follow, one panel a section.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    sections = _section_parameters()

    @functools.wraps(command)
    def with_settings(**values: Any) -> None:
        path = values.pop("config_file")
        options = {name: values.pop(name) for name in ["model", *sections]}
        settings = read_settings(path, options)
        _serve_as_rank(settings.config)
        command(settings, **values)

    parameters = [_model_parameter(), *own, _config_parameter(), *sections.values()]
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    with_settings.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {p.name: p.annotation for p in keyword_only}
    return with_settings


def _serve_as_rank(config: EngineConfig) -> None:
    """In an external launch only rank 0 runs the command; the others compute for it, and do not come back here."""
    if config.parallel.launcher == "external":
        from headrace.engine.assemble import launch_place, serve_rank

        place = launch_place(config.parallel)
        if place is not None and place.rank:
            serve_rank(place)


def read_settings(path: Path | None, options: dict[str, Any]) -> EngineSettings:
    """Build the configuration from a YAML file (or none) and flat options that win over it; None is "not given"."""
    given = {name: value for name, value in options.items() if value is not None}
    if path is None:
        config, origins = EngineConfig.from_options(**given), {}
    else:
        config = _load(path, given)
        origins = dict.fromkeys(_names_in(path), path.name)
    for name, value in given.items():
        origins[name] = "MODEL" if name == "model" else flag_of(f"no_{name}" if value is False else name)
    return EngineSettings(config, origins)


def _load(path: Path, given: dict[str, Any]) -> EngineConfig:
    """The file's settings under the flags. Raises ConfigError, naming the file unless the flags alone are wrong."""
    try:
        return EngineConfig.load(path, **given)
    except ConfigError as error:
        EngineConfig.from_options(**given)
        message = str(error)
        if str(path) in message:
            raise
        owners = option_owners()
        misplaced = [name for name in _top_level(path) if name in owners]
        if misplaced:
            name = misplaced[0]
            message = f"{name!r} belongs under section {owners[name]!r}: write {owners[name]}: {{{name}: …}}"
        raise ConfigError(f"configuration {str(path)!r}: {message}") from error


def flag_of(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def _top_level(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text()) or {}


def _names_in(path: Path) -> list[str]:
    return [name for section in _top_level(path).values() for name in section]


def _model_parameter() -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
    return inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--config", metavar="FILE.yaml", help="settings as YAML, nested by section; flags win"
    )
    return inspect.Parameter(
        "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _section_parameters() -> dict[str, inspect.Parameter]:
    """One keyword parameter for each setting but the model itself."""
    parameters: dict[str, inspect.Parameter] = {}
    for section in dataclasses.fields(EngineConfig):
        owner = typing.cast(type, section.default_factory)
        hints = typing.get_type_hints(owner)
        for setting in dataclasses.fields(owner):
            if setting.name != "model":
                parameters[setting.name] = _setting_parameter(section.name, setting, hints[setting.name])
    return parameters


def _setting_parameter(section: str, setting: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    flag = flag_of(setting.name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if hint is bool else flag,
        help=setting.metadata["doc"] + _default_note(setting.default),
        show_default=False,
        rich_help_panel=f"Engine: {section}",
    )
    annotation = Annotated[hint | None, option]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _default_note(default: Any) -> str:
    if default is None:
        return ""
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f" (default {shown})"

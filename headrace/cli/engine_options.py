"""Command-line flags made from the configuration's sections, and what a command gets of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.model_command import ModelCommand
from headrace.config import EngineConfig, build_section, option_owners
from headrace.config_checks import is_size
from headrace.config_file import read_sections
from headrace.errors import ConfigError
from headrace.names import unknown_name

SERVER = "server"
"""The section of the file that only ``headrace serve`` has flags for."""

_MODEL_HELP = "Hugging Face folder or id, .gguf file, or packaged model name (default smollm2)"


@dataclass(frozen=True)
class EngineSettings:
    """The engine's configuration, and where each value came from.

    origins: {flat option name: "--block-size" or "settings.yaml"}; options left out have their default.
    path: the file, if there was one.
    server: the file's section for ``headrace serve``, {setting: value}.
    """

    config: EngineConfig
    origins: dict[str, str]
    path: Path | None = None
    server: dict[str, Any] = dataclasses.field(default_factory=dict)


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
    with_settings.command_class = ModelCommand  # type: ignore[attr-defined]
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
    sections = {} if path is None else read_sections(path)
    engine = {name: values for name, values in sections.items() if name != SERVER}
    with blaming(path, lambda: EngineConfig.from_options(**given)):
        config = _engine_config(engine, given)
        if SERVER in sections:
            _check_server(sections[SERVER])
    origins = {} if path is None else {name: path.name for values in sections.values() for name in values}
    origins |= {
        name: "MODEL" if name == "model" else _given_flag(name, value) for name, value in given.items()
    }
    return EngineSettings(config, origins, path, sections.get(SERVER, {}))


@contextlib.contextmanager
def blaming(path: Path | None, alone: Callable[[], object]) -> Iterator[None]:
    """Name the file in a ConfigError from the block, unless the flags are wrong by themselves: ``alone`` tells."""
    try:
        yield
    except ConfigError as error:
        alone()
        if path is None or str(path) in str(error):
            raise
        raise ConfigError(f"configuration {str(path)!r}: {error}") from error


def _engine_config(sections: dict[str, Any], given: dict[str, Any]) -> EngineConfig:
    """Raises ConfigError, for a setting outside its section with the section's name."""
    owners = option_owners()
    if sections:
        owners |= dict.fromkeys(_server_names(), SERVER)
    known = {*owners.values()}
    for name in sections:
        if name in owners and name not in known:
            raise ConfigError(
                f"{name!r} belongs under section {owners[name]!r}: write {owners[name]}: {{{name}: …}}"
            )
        if name not in known:
            raise ConfigError(unknown_name("section", name, known))
    return EngineConfig.from_sections(sections, **given)


def _server_names() -> list[str]:
    from headrace.serve.settings import ServerConfig

    return [setting.name for setting in dataclasses.fields(ServerConfig)]


def _check_server(values: Any) -> None:
    """Mistakes in the server's section are told by every command that reads the file."""
    from headrace.serve.settings import ServerConfig

    build_section(ServerConfig, SERVER, values)


def flag_of(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def _given_flag(name: str, value: Any) -> str:
    return flag_of(f"no_{name}" if value is False else name)


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
                panel = f"Engine: {section.name}"
                parameters[setting.name] = setting_parameter(panel, setting, hints[setting.name])
    return parameters


def setting_parameter(panel: str, setting: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """A flag for one field of a section, None when it is not given. ``panel`` is its heading in the help."""
    flag = flag_of(setting.name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if hint is bool else flag,
        help=setting.metadata["doc"] + _default_note(setting.default),
        show_default=False,
        rich_help_panel=panel,
        metavar="SIZE" if is_size(setting.name) else None,
    )
    # A size may have a unit, which the configuration reads.
    annotation = Annotated[str | None, option] if is_size(setting.name) else Annotated[hint | None, option]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _default_note(default: Any) -> str:
    if default is None:
        return ""
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f" (default {shown})"

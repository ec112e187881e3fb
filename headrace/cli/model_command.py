"""ModelCommand: a command whose first argument is the model, which may be left out."""

from __future__ import annotations

from typing import Any

from headrace.cli.lazy_group import SectionedCommand
from headrace.errors import ConfigError
from headrace.names import counterpart

_MODEL_FLAGS = ("--model", "-m")
"""How other engines' command lines take the model."""


class ModelCommand(SectionedCommand):
    """Where one argument is given and MODEL is not the only one that the command takes, it is the one that is needed.

    Options of other engines are refused with what is written here instead.
    """

    def make_parser(self, ctx: Any) -> Any:
        """The parser, which raises ConfigError for other engines' options."""
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            given = list(args)
            try:
                options, rest, order = parse(args=args)
            except Exception as error:
                _advise(getattr(error, "option_name", None), ctx.command_path, given)
                raise
            self._leave_model_out(options)
            return options, rest, order

        parser.parse_args = parse_args
        return parser

    def _leave_model_out(self, options: dict[str, Any]) -> None:
        for param in self.params:
            is_needed = param.param_type_name == "argument" and param.required
            if is_needed and not isinstance(options.get(param.name), str) and options.get("model"):
                options[param.name] = options.pop("model")


def _advise(flag: str | None, command: str, given: list[str]) -> None:
    """Raises ConfigError for a flag that other engines have; others are left to the parser's own error."""
    if flag in _MODEL_FLAGS:
        words = [word.partition("=") for word in given]
        places = [place for place, (name, _, _) in enumerate(words) if name == flag]
        value = words[places[0]][2] or "".join(given[places[0] + 1 : places[0] + 2]) if places else ""
        raise ConfigError(
            f"{flag} is no option: the model is the first argument, as {command} {value or 'smollm2'}"
        )
    instead = counterpart((flag or "").lstrip("-").replace("-", "_"))
    if instead:
        raise ConfigError(f"{flag} has no counterpart here: {instead}")

"""The ``headrace`` command: one table of commands, each loaded when it is used."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli.lazy_group import CONTEXT_SETTINGS, LazyGroup
from headrace.errors import HeadraceError

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

# Name -> ("module:function", one line of help). A new command is a new row.
COMMANDS = {
    "chat": ("headrace.cli.chat:chat", "Talk to a model in the terminal."),
    "serve": ("headrace.cli.serve:serve", "Serve a model over HTTP with OpenAI's API."),
    "generate": ("headrace.cli.generate:generate", "Answer prompts; the text alone goes to stdout."),
    "bench": ("headrace.cli.bench:bench", "Run a workload file of token ids and report speed and latencies."),
    "explain": ("headrace.cli.explain:explain", "Print every effective setting and where it comes from."),
}

app = typer.Typer(
    cls=LazyGroup.of(COMMANDS),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT_SETTINGS,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Log details and show tracebacks; may stand anywhere.")
    ] = False,
) -> None:
    """Headrace: LLM inference and serving."""


def main() -> None:
    """Run the command line. A mistake ends with one line on stderr and exit code 2, a traceback only with --debug."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    is_debug = len(arguments) < len(sys.argv) - 1
    logging.basicConfig(
        level=logging.DEBUG if is_debug else logging.WARNING,
        stream=sys.stderr,
        format="%(levelname)s %(name)s: %(message)s",
    )
    sys.exit(run(arguments, is_debug=is_debug))


def run(arguments: list[str], *, is_debug: bool = False) -> int:
    """Run one command and return its exit code."""
    try:
        code = app(arguments or ["--help"], prog_name="headrace", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (``| head``). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if is_debug:
            raise
        sys.stderr.write(f"headrace: {_one_line(error)}\n")
        return EXIT_MISTAKE if _is_mistake(error) else 1


def _is_mistake(error: Exception) -> bool:
    """True for what the user can mend: our own errors and those of the command line's syntax."""
    return isinstance(error, HeadraceError) or hasattr(error, "format_message")


def _one_line(error: Exception) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    if not _is_mistake(error):
        text = f"{type(error).__name__}: {text} (this is a fault of Headrace; --debug shows where)"
    return " ".join(text.split())

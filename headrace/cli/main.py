"""The ``headrace`` command: one table of commands, each loaded when it is used."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import sys
from typing import Annotated, TextIO

import typer

from headrace import __version__
from headrace.cli.lazy_group import CONTEXT_SETTINGS, LazyGroup
from headrace.errors import HeadraceError

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
_PARSERS_WORDS = "Value error, "
"""What the parser of flags puts before its own sentences."""
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# Name -> ("module:function", one line of help). A new command is a new row.
COMMANDS = {
    "chat": ("headrace.cli.chat:chat", "Talk to a model in the terminal."),
    "serve": ("headrace.cli.serve:serve", "Serve a model over HTTP with OpenAI's API."),
    "generate": ("headrace.cli.generate:generate", "Answer prompts; the text alone goes to stdout."),
    "bench": ("headrace.cli.bench:bench", "Run a workload file of token ids and report speed and latencies."),
    "cache": ("headrace.cli.cache:cache", "Draw the prefix cache of a running server."),
    "explain": ("headrace.cli.explain:explain", "Print every effective setting and where it comes from."),
}

app = typer.Typer(
    cls=LazyGroup.of(COMMANDS),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT_SETTINGS,
)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the sys.stderr of the moment: a progress bar replaces it to keep messages on lines of their own."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The present sys.stderr."""
        return sys.stderr


class ClosedOutput(io.TextIOBase):
    """A stdout that is not there: writing fails as it would on a closed descriptor."""

    def write(self, text: str) -> int:
        """Raises OSError."""
        raise OSError(errno.EBADF, "standard output is closed")


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
        handlers=[StderrHandler()],
        format="%(levelname)s %(name)s: %(message)s",
    )
    # Before torch loads OpenMP: threads that wait for the next step sleep, and leave their cores to whoever has work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if sys.stdout is None:  # started with a closed one (``>&-``)
        sys.stdout = ClosedOutput()
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
        _forget_output()  # the reader of our output left (``| head``)
        return 0
    except OSError as error:
        if is_debug:
            raise
        _forget_output()
        what = "" if error.filename or error.errno not in _OUTPUT_ERRORS else "cannot write the output: "
        sys.stderr.write(f"headrace: {what}{_one_line(error)}\n")
        return EXIT_MISTAKE
    except Exception as error:
        if is_debug:
            raise
        sys.stderr.write(f"headrace: {_one_line(error)}{_given_value(error, arguments)}\n")
        return EXIT_MISTAKE if _is_mistake(error) else 1


def _forget_output() -> None:
    """Drop what stdout still holds, or Python would complain once more when it flushes at exit."""
    with contextlib.suppress(OSError):  # there is no descriptor behind a stdout that was closed or replaced
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_mistake(error: Exception) -> bool:
    """True for what the user can mend: our own errors, the system's, and those of the command line's syntax."""
    return isinstance(error, HeadraceError | OSError) or hasattr(error, "format_message")


def _given_value(error: Exception, arguments: list[str]) -> str:
    """ "; got …" where the command line's parser names a flag whose value is wrong, but not the value."""
    flags = getattr(getattr(error, "param", None), "opts", [])
    given = [
        value if equals else following
        for argument, following in itertools.pairwise([*arguments, ""])
        for name, equals, value in [argument.partition("=")]
        if name in flags
    ]
    return f"; got {given[-1]!r}" if given and repr(given[-1]) not in str(error) else ""


def _one_line(error: Exception) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    text = text.replace(_PARSERS_WORDS, "")
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if not _is_mistake(error):
        text = f"{type(error).__name__}: {text} (this is a fault of Headrace; --debug shows where)"
    return " ".join(text.split())

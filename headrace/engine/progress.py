"""Progress bars on stderr, for long work with a person watching."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LoadBar:
    """Shows how far loading has come; call it with (stage, share done). Silent unless stderr is a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> LoadBar:
        if sys.stderr.isatty():
            self._progress = _new_progress(is_transient=True)
            self._task = self._progress.add_task("loading", total=1.0)
            self._progress.start()
        return self

    def __call__(self, stage: str, share: float) -> None:
        """Report that ``stage`` is done to ``share`` in [0, 1]."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=stage, completed=share)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


class AnswerBar:
    """Counts finished prompts and their tokens, and shows the rate; does nothing when not ``is_shown``."""

    def __init__(self, num_prompts: int, is_shown: bool) -> None:
        self._num_tokens = 0
        self._progress: Progress | None = None
        if is_shown:
            self._progress = _new_progress(is_transient=False)
            self._task = self._progress.add_task("prompts", total=num_prompts, rate="")

    def __enter__(self) -> AnswerBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def finished_one(self, num_output_tokens: int) -> None:
        """A prompt has all its answers, of so many tokens together."""
        if self._progress is None:
            return
        self._num_tokens += num_output_tokens
        task = self._progress.tasks[0]
        rate = f"{self._num_tokens:,} tokens"
        if task.elapsed:
            rate += f", {self._num_tokens / task.elapsed:.0f} tok/s"
        self._progress.update(self._task, advance=1, rate=rate)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _new_progress(is_transient: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = [] if is_transient else [MofNCompleteColumn(), TextColumn("{task.fields[rate]}")]
    columns = [TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn()]
    return Progress(*columns, console=Console(stderr=True), transient=is_transient)

"""The live display of a run: a bar with losses, speed and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Use as a context; call `show` as often as you like. A `quiet` display says nothing (other ranks)."""

    def __init__(self, title: str, console: Console, *, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown = time.monotonic()
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn(f"[bold]{title}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(compact=True),
                console=console,
            )

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("train", total=1.0, text="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, progress: float, losses: dict[str, float], rate: float) -> None:
        """`rate` in steps a second; `losses` as read from the step."""
        terms = "  ".join(f"{name.removeprefix('loss/')} {value:.3f}" for name, value in losses.items())
        text = f"step {step}  {rate:.1f}/s  {terms}"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress, text=text)
        elif not self.quiet and time.monotonic() - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            self.console.print(f"{progress:4.0%}  {text}", highlight=False, soft_wrap=True)

"""Reports of a run: files in the run folder, and the display during training.

config.yaml, environment.json, run.json (status and totals), metrics.jsonl, tensorboard/. metrics.jsonl has no
clock-dependent values, so that a resumed run reproduces it exactly.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pclmix import __version__
from pclmix.config import Config
from pclmix.errors import PclmixError, read_yaml
from pclmix.io.files import atomic_path, read_table, write_json

CONFIG, ENVIRONMENT, RUN, METRICS = "config.yaml", "environment.json", "run.json", "metrics.jsonl"
PLAN = "plan.yaml"  #: the commented plan of a run without a recipe
_SECONDS_BETWEEN_LINES = 10.0
log = logging.getLogger(__name__)


def start_run(folder: Path, config: Config, device: str) -> None:
    """Write configuration and environment; files of the same run are replaced."""
    with atomic_path(folder / CONFIG) as temporary:
        temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    write_json(folder / ENVIRONMENT, environment(device))


def read_config(folder: Path) -> dict[str, Any] | None:
    """The configuration of a run; None if there is no run."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        return None
    try:
        content = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (PclmixError, UnicodeDecodeError):
        content = None
    if not isinstance(content, dict) or not content:
        raise PclmixError(f"{path} is damaged: it holds no settings; repair it, or start again in another folder")
    return content


def environment(device: str) -> dict[str, Any]:
    """Versions, device, commit and command, to reproduce a result."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "triton", "numpy", "nibabel", "scipy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "pclmix": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else device,
        "threads": torch.get_num_threads(),
        "packages": packages,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _commit() -> str | None:
    """The commit of the source tree, from PCLMIX_COMMIT (for copies without history) or git."""
    if os.environ.get("PCLMIX_COMMIT"):
        return os.environ["PCLMIX_COMMIT"]
    try:
        top = Path(__file__).parents[3]
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=top,
            capture_output=True,
            text=True,
            timeout=5,
        )
        return done.stdout.strip() or None if done.returncode == 0 and (top / "pyproject.toml").is_file() else None
    except (OSError, subprocess.SubprocessError):
        return None


def write_status(folder: Path, **status: Any) -> None:
    """Merge `status` into run.json."""
    path = folder / RUN
    known = read_table(path) if path.is_file() else {}
    write_json(path, {**known, **status})


class MetricLog:
    """metrics.jsonl and TensorBoard; a resumed run first cuts both back to its checkpoint."""

    def __init__(self, folder: Path, resume_at: int) -> None:
        self.path = folder / METRICS
        self.folder = folder
        self.resume_at = resume_at
        self._writer: Any = None
        kept = [line for line in read_metrics(folder) if line["step"] <= resume_at]
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, float], *, round: int = 1, **clocked: float) -> None:
        """One line of metrics.jsonl; `clocked` values, which differ from run to run, go to TensorBoard only."""
        try:
            self._file.write(json.dumps({"step": step, "round": round, **values}) + "\n")
            self._file.flush()
            for name, value in {**values, **clocked}.items():
                self._tensorboard().add_scalar(name, value, step)
        except OSError as error:
            raise PclmixError(
                f"cannot write {self.path}: {error.strerror}; free some space, then continue with --resume"
            ) from error

    def _tensorboard(self) -> Any:
        """Created at the first line, since its import is slow."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter

                folder = str(self.folder / "tensorboard")
                self._writer = SummaryWriter(folder, purge_step=self.resume_at + 1)  # type: ignore[no-untyped-call]
            except ImportError:
                log.info("no files for TensorBoard: they need the extra 'tensorboard', pip install '.[tensorboard]'")
                self._writer = _Silent()
        return self._writer

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


class _Silent:
    def add_scalar(self, *_: Any) -> None:
        return

    def close(self) -> None:
        return


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
    path = Path(folder) / METRICS
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict):
                break
            lines.append(line)
    return lines


class Display:
    """A bar with losses, speed and time left on a terminal, a line every few seconds elsewhere. Use as a context.

    A `quiet` display, as of ranks other than 0, shows nothing.
    """

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
        """`rate` in steps per second; `losses` as returned by the step."""
        terms = "  ".join(f"{name.removeprefix('loss/')} {value:.3f}" for name, value in losses.items())
        text = f"step {step}  {rate:.1f}/s  {terms}"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress, text=text)
        elif not self.quiet and time.monotonic() - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            self.console.print(f"{progress:4.0%}  {text}", highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as readable text.

    >>> duration(42.0), duration(754.0), duration(7500.0)
    ('42 s', '13 min', '2 h 5 min')
    """
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"

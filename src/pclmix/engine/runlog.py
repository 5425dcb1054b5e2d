"""The run folder: what was asked, where it ran, what happened.

config.yaml, environment.json, run.json (status and totals), metrics.jsonl, tensorboard/, and at the end pictures.
metrics.jsonl holds nothing that depends on the clock, so that a resumed run repeats it to the last digit.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from pclmix import __version__
from pclmix.config import Config
from pclmix.errors import PclmixError
from pclmix.files import atomic_path, read_json, write_json

CONFIG, ENVIRONMENT, RUN, METRICS = "config.yaml", "environment.json", "run.json", "metrics.jsonl"
log = logging.getLogger(__name__)


def start_run(folder: Path, config: Config, device: str) -> None:
    """Write what the run is made of; an older file of the same run is replaced whole."""
    with atomic_path(folder / CONFIG) as temporary:
        temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    write_json(folder / ENVIRONMENT, environment(device))


def read_config(folder: Path) -> dict[str, Any] | None:
    """The configuration a run was begun with, None where there is no run."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        content = None
    if not isinstance(content, dict):
        raise PclmixError(f"{path} is damaged: it holds no settings; repair it, or start again in another folder")
    return content


def environment(device: str) -> dict[str, Any]:
    """Versions, device, commit and command, for anyone who wants to repeat or doubt a figure."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "triton", "numpy", "nibabel", "lightning-fabric", "scipy"):
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
    """The commit of the source tree this runs from: as PCLMIX_COMMIT says, for a copy without its history, or git."""
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
    known = read_json(path) if path.is_file() else {}
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

    def write(self, step: int, values: dict[str, float], **clocked: float) -> None:
        """One line of metrics.jsonl; `clocked` values, which differ from run to run, go to TensorBoard only."""
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
            for name, value in {**values, **clocked}.items():
                self._tensorboard().add_scalar(name, value, step)
        except OSError as error:
            raise PclmixError(
                f"cannot write {self.path}: {error.strerror}; free some space, then go on with --resume"
            ) from error

    def _tensorboard(self) -> Any:
        """Made at the first line, not at the start: its import is slow and training should not wait for it."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter

                folder = str(self.folder / "tensorboard")
                self._writer = SummaryWriter(folder, purge_step=self.resume_at + 1)  # type: ignore[no-untyped-call]
            except ImportError:
                log.warning("tensorboard is not installed: metrics.jsonl is written, TensorBoard's files are not")
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
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines

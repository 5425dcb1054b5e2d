"""What a study consists of: independent runs, kept in STUDY/study.json so that the same command goes on with them."""

from __future__ import annotations

import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pclmix import __version__
from pclmix.errors import PclmixError
from pclmix.inference.predictor import TTA
from pclmix.io.files import atomic_path, read_json, refuse_existing, require_writable, write_json
from pclmix.training.log import CONFIG

STUDY, README = "study.json", "README.txt"
EVALUATION, CASES, PREDICTIONS = "evaluation.json", "cases.csv", "predictions"


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run besides its data; a run goes on only with the same ones."""

    method: str | None = None
    recipe: str = "fast"  #: never a plan that each run would make for itself: runs of a study are compared
    overrides: tuple[str, ...] = ()
    tta: TTA = "none"
    largest_component: bool = False


@dataclass(frozen=True)
class Run:
    """One training of a study, predicted and scored. Runs do not depend on each other."""

    folder: str  #: below the study's own, with / between parts
    fold: int
    settings: Settings
    variant: str = ""  #: its row in the table; empty in a cross-validation

    @property
    def name(self) -> str:
        return f"{self.variant}, fold {self.fold}" if self.variant else f"fold {self.fold}"

    @classmethod
    def from_json(cls, folder: str, content: dict[str, Any]) -> Run:
        given = content["settings"]
        settings = Settings(**{**given, "overrides": tuple(given["overrides"])})
        return cls(folder, content["fold"], settings, content["variant"])


@dataclass(frozen=True)
class Study:
    """Runs of one dataset in one folder."""

    folder: Path
    kind: str  #: the command that made it
    dataset: Path
    runs: tuple[Run, ...]
    id: str = ""
    command: str = ""
    started_in: str = ""  #: the working folder that the command's paths are relative to

    def place(self, run: Run) -> Path:
        return self.folder / run.folder

    def begin(self) -> Study:
        """Write study.json and README.txt; an earlier study in the folder must agree, and its runs are kept."""
        folder = self.folder
        if folder.is_file():
            raise PclmixError(f"{folder} is a file; --out is the folder for the runs")
        path = folder / STUDY
        if not path.is_file():
            refuse_existing(folder)
        require_writable(folder)
        earlier = read_study(folder) if path.is_file() else None
        if earlier is not None:
            _require_same(earlier, self)
        kept = {run.folder: run for run in (earlier.runs if earlier is not None else ())}
        kept.update({run.folder: run for run in self.runs})
        words = [Path(sys.argv[0]).name.replace("__main__.py", "pclmix"), *sys.argv[1:]]
        content = {
            "id": earlier.id if earlier is not None else uuid.uuid4().hex,
            "kind": self.kind,
            "folder": str(folder.resolve()),
            "dataset": str(self.dataset),
            "command": shlex.join(words),
            "started_in": str(Path.cwd()),
            "pclmix": __version__,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs": {
                run.folder: {"variant": run.variant, "fold": run.fold, "settings": asdict(run.settings)}
                for run in kept.values()
            },
        }
        write_json(path, content)
        with atomic_path(folder / README) as temporary:
            temporary.write_text(_readme(content), encoding="utf-8")
        return read_study(folder)


def read_study(folder: Path) -> Study:
    """The study in a folder, as study.json has it."""
    path = Path(folder) / STUDY
    if not path.is_file():
        raise PclmixError(f"{path} does not exist; give the --out folder of crossval, ablate or sweep")
    content = read_json(path)
    try:
        runs = tuple(Run.from_json(name, entry) for name, entry in content["runs"].items())
        return Study(
            Path(folder),
            content["kind"],
            Path(content["dataset"]),
            runs,
            content["id"],
            content["command"],
            content["started_in"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise PclmixError(
            f"{path} is damaged or of another version of pclmix ({error!r}); choose another --out"
        ) from error


def _require_same(earlier: Study, now: Study) -> None:
    """A run that has begun goes on with the settings it began with, on the same dataset."""
    for what, before, here in (("command", earlier.kind, now.kind), ("dataset", earlier.dataset, now.dataset)):
        if before != here:
            raise PclmixError(
                f"{now.folder} is a study of another {what} ({before} then, {here} now); choose another --out"
            )
    known = {run.folder: run for run in earlier.runs}
    for run in now.runs:
        before_, here_ = known.get(run.folder), asdict(run.settings)
        if before_ is None or not (now.place(run) / CONFIG).is_file():
            continue
        then = asdict(before_.settings)
        changed = [key for key in here_ if then[key] != here_[key]]
        if changed:
            shown = f"{changed[0]}: {_shown(then[changed[0]])} then, {_shown(here_[changed[0]])} now"
            raise PclmixError(
                f"{now.place(run)} was begun with other settings ({shown}); repeat them or choose another --out"
            )


def _shown(value: Any) -> str:
    return " ".join(value) or "none" if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _readme(content: dict[str, Any]) -> str:
    return f"""A study of pclmix {content["pclmix"]}: {content["kind"]}, {len(content["runs"])} runs.
Dataset: {content["dataset"]}

To continue it, or to run what failed again, give the same command:

    cd {shlex.quote(content["started_in"])}
    {content["command"]}

To see how far it is:

    pclmix status {shlex.quote(content["folder"])}

study.json         the runs and their settings
RUN/               a run folder of `pclmix train`; RUN is a key of "runs" in study.json
RUN/node.json      where it ran: node, device, threads, attempts
RUN/console.log    what it printed
RUN/predictions/   label maps of the test cases
RUN/evaluation.json, RUN/cases.csv    their scores; a run that has them is not repeated
evaluation.json, cases.csv            the same over all folds (in each variant's folder where there are several)
comparison/        the table and figures over all variants, once every run is finished
"""

"""The demo: PCLMix and partial cross-entropy, the same scribbles and seconds, scored on held-out patients."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pclmix import __version__
from pclmix.data.dataset import Dataset, write_splits
from pclmix.data.splits import patient_splits
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.files import predict_files
from pclmix.io.files import atomic_path, read_json, refuse_existing, write_json
from pclmix.metrics import Summary, evaluate
from pclmix.metrics.comparison import LEVEL, Comparison, compare_pair
from pclmix.report.training import draw_run
from pclmix.synth.phantom import make_phantom
from pclmix.training.log import ENVIRONMENT, RUN, read_metrics
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

METHODS = ("pclmix", "pce")
NAMES = {"pclmix": "PCLMix", "pce": "Partial cross-entropy", "full": "Full supervision"}
RECIPE = "demo"
DATASET, REPORT, RESULT = "dataset", "report.html", "demo.json"
#: Everything that a demo writes; a folder that holds anything else is never overwritten.
OWN = {DATASET, REPORT, RESULT, *METHODS}
FOLD = 1
#: Half for training and half held out. With few annotated patients the methods differ most: with 16 for training
#: PCLMix was 4 Dice points ahead in one run, with 6 it was 30.
PATIENTS, FOLDS = 12, 2
SECONDS = 80.0  #: for each method; the whole demo then takes well under four minutes on two cores


@dataclass(frozen=True)
class Trained:
    """One method of the demo: its run folder, how long it trained, and its scores on the held-out patients."""

    method: str
    run: Path
    steps: int
    seconds: float
    summary: Summary

    @property
    def name(self) -> str:
        return NAMES[self.method]

    @property
    def predictions(self) -> Path:
        """Label maps of the held-out volumes, and their entropy."""
        return self.run / "predictions"

    def curves(self) -> list[dict[str, float]]:
        return read_metrics(self.run)

    def to_json(self) -> dict[str, Any]:
        content = self.summary.to_json()
        classes = {
            name: {measure: content["classes"][name][measure]["mean"] for measure in ("Dice", "HD95")}
            for name in self.summary.names
        }
        mean, nan = content["mean"], content["nan"]
        scores = {"Dice": mean["Dice"], "HD95": mean["HD95"], "HD95_nan": nan["HD95"], "classes": classes}
        return {**scores, "seconds": self.seconds, "steps": self.steps}


@dataclass(frozen=True)
class Demo:
    """Both methods, PCLMix first, and the difference between them."""

    root: Path
    dataset: Dataset
    trained: tuple[Trained, Trained]
    difference: Comparison
    seed: int
    budget: float  #: seconds of training each method was given
    seconds: float  #: of everything, until the report

    @property
    def points(self) -> float:
        """Dice points by which PCLMix is ahead; negative where it is behind."""
        return 100 * self.difference.mean["Dice"].difference

    @property
    def verdict(self) -> str:
        """One sentence: which method is ahead, by how much, and how sure that is."""
        ours, other = self.trained
        interval = self.difference.mean["Dice"]
        side = "ahead of" if self.points >= 0 else "behind"
        sure = ""
        if not math.isnan(interval.low):
            low, high = signed(100 * interval.low), signed(100 * interval.high)
            sure = f"; {LEVEL:.0%} interval of the difference {low} to {high}"
        return (
            f"After {self.budget:g} seconds of training each, from the same scribbles, {ours.name} is "
            f"{abs(self.points):.1f} Dice points {side} {other.name.lower()} on "
            f"{self.difference.patients} held-out patients ({100 * ours.summary.mean('Dice').mean:.1f} and "
            f"{100 * other.summary.mean('Dice').mean:.1f}{sure})."
        )

    @property
    def environment(self) -> dict[str, Any]:
        content: dict[str, Any] = read_json(self.trained[0].run / ENVIRONMENT)
        return content

    def to_json(self) -> dict[str, Any]:
        return {
            **{one.method: one.to_json() for one in self.trained},
            "dice_points_ahead": self.points,
            "seconds": self.budget,
            "total_seconds": self.seconds,
            "seed": self.seed,
            "fold": FOLD,
            "patients": {"training": len(self._patients(False)), "held_out": len(self._patients(True))},
            "recipe": RECIPE,
            "version": __version__,
            "environment": self.environment,
        }

    def _patients(self, held_out: bool) -> set[str]:
        fold = self.dataset.fold(FOLD)
        return {case.rsplit("_", 1)[0] for case in (fold.test if held_out else fold.train)}


def run_demo(
    out: Path, *, seed: int = 0, seconds: float = SECONDS, overwrite: bool = False, console: Console | None = None
) -> Demo:
    """Make the phantom, train, predict, evaluate and write OUT/report.html and OUT/demo.json."""
    from pclmix.studies.demo_page import page

    console = console or Console(stderr=True)
    started = time.perf_counter()
    clear(out, overwrite=overwrite)
    console.print(f"making the phantom: {PATIENTS} patients", highlight=False)
    make_dataset(out / DATASET, seed)
    trained = [train_and_score(out, method, seed, seconds, console) for method in METHODS]
    ours, other = trained
    demo = Demo(
        out,
        Dataset.open(out / DATASET),
        (ours, other),
        compare_pair(ours.summary, other.summary, other.name),
        seed,
        seconds,
        round(time.perf_counter() - started, 1),
    )
    with atomic_path(out / REPORT) as temporary:
        temporary.write_text(page(demo), encoding="utf-8")
    write_json(out / RESULT, demo.to_json())
    return demo


def signed(value: float) -> str:
    """One decimal with its sign, and a minus sign instead of a hyphen.

    >>> signed(5.04), signed(-0.31)
    ('+5.0', '−0.3')
    """
    return f"{value:+.1f}".replace("-", "−")


def clear(out: Path, *, overwrite: bool) -> None:
    """Make room for a demo: an earlier one goes if `overwrite`, anything else is refused."""
    refuse_existing(out, overwrite=overwrite, way_out="replace it with --overwrite, or choose another --out")
    if not out.is_dir():
        return
    strangers = sorted(entry.name for entry in out.iterdir() if entry.name not in OWN)
    if strangers:
        raise PclmixError(f"{out} holds {strangers[0]}, which is not of a demo; choose another --out")
    for entry in out.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def make_dataset(root: Path, seed: int) -> None:
    """A phantom of PATIENTS in two folds by patient."""
    write_splits(root, patient_splits(make_phantom(root, PATIENTS, seed), FOLDS))


def train_and_score(out: Path, method: str, seed: int, seconds: float, console: Console) -> Trained:
    """Train on one half of OUT/dataset, predict and score the other; a finished training is not repeated."""
    dataset, run = out / DATASET, out / method
    console.print(f"training {NAMES.get(method, method)} for {seconds:g} seconds", highlight=False)
    overrides = [f"engine.seconds={seconds}", f"seed={seed}"]
    # Always on the CPU: the recipe was chosen there, and a GPU would be idle most of the time with its small batches.
    request = TrainRequest(
        dataset,
        run,
        method=method,
        recipe=RECIPE,
        overrides=overrides,
        fold=FOLD,
        resume=True,
        expect_run=False,
        device="cpu",
    )
    if run_training(request, console):
        draw_run(run)
    else:
        raise PclmixError("the demo was interrupted; start it again with --overwrite")
    predictions = run / "predictions"
    predict_files(load(run, device="cpu"), dataset, predictions, fold=FOLD, uncertainty=True).require_good()
    summary = evaluate(predictions, dataset, fold=FOLD)
    summary.write_json(run / "evaluation.json")
    summary.write_csv(run / "cases.csv")
    status = read_json(run / RUN)
    return Trained(method, run, int(status["step"]), float(status["seconds"]), summary)

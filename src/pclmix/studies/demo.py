"""The demo: PCLMix and partial cross-entropy on the same scribbles, scored on held-out patients, and its page."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pclmix import __version__
from pclmix.config import load_config
from pclmix.data.check import check
from pclmix.data.dataset import Dataset, patient_splits, write_splits
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.files import predict_files
from pclmix.inference.uncertainty import FOLDER
from pclmix.io.files import atomic_path, read_json, refuse_existing, write_json
from pclmix.io.volume import read_image, read_labels
from pclmix.metrics import Summary, evaluate
from pclmix.metrics.comparison import LEVEL, Comparison, compare_pair
from pclmix.metrics.summary import AVERAGE
from pclmix.report import figures, pages, tables
from pclmix.report.tables import Run
from pclmix.report.training import draw_run
from pclmix.synth.phantom import make_phantom
from pclmix.training.log import ENVIRONMENT, RUN, read_metrics
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

METHODS = ("pclmix", "pce")
NAMES = {"pclmix": "PCLMix", "pce": "Partial cross-entropy", "full": "Full supervision"}
RECIPE = "demo"
DATASET, REPORT, RESULT = "dataset", "report.html", "demo.json"
#: All names that a demo writes; a folder with other files is never overwritten.
OWN = {DATASET, REPORT, RESULT, *METHODS}
FOLD = 1
#: Half for training and half held out. With few annotated patients the methods differ most: with 16 for training
#: PCLMix was 4 Dice points ahead in one run, with 6 it was 30.
PATIENTS, FOLDS = 12, 2
SECONDS = 80.0  #: for each method; the whole demo then takes well under four minutes on two cores


@dataclass(frozen=True)
class Trained:
    """One method of the demo: run folder, training time, and scores on the held-out patients."""

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
    seconds: float  #: total seconds until the report

    @property
    def points(self) -> float:
        """Dice points by which PCLMix is ahead; negative where it is behind."""
        return 100 * self.difference.mean["Dice"].difference

    @property
    def verdict(self) -> str:
        """One sentence: the better method, the difference and its interval."""
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
    console = console or Console(stderr=True)
    started = time.perf_counter()
    load_config("demo", None, [f"engine.seconds={seconds}"])  # refused before anything is written
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
    """Remove an earlier demo if `overwrite`; refuse any other existing folder."""
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
    # Always on the CPU: the recipe was chosen for it, and its batches are too small for a GPU.
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


#: Terms of metrics.jsonl by the names of the paper.
TERMS = {
    "loss": "total loss",
    "loss/sup": "supervised, eq. 4",
    "loss/ctr": "contrast, eq. 8",
    "loss/het": "consistency between decoders, eq. 9",
    "loss/mix": "consistency under mixing, eq. 12",
    "loss/pce": "partial cross-entropy, eq. 3",
}


@dataclass(frozen=True)
class Picture:
    """One cell of the table of pictures."""

    name: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Row:
    cells: list[Picture]
    caption: str


def page(demo: Demo) -> str:
    """The whole page."""
    labels, trained = demo.dataset.labels, demo.trained
    table = tables.build([Run(one.name, one.summary) for one in trained], against=None, empty="nan")
    dice = [(f"{100 * one.summary.mean('Dice').mean:.1f}", f"{one.name}, mean Dice, %") for one in trained]
    heads = ["image", "scribble", *(text for one in trained for text in (one.name, "its uncertainty")), "dense mask"]
    colours = [*labels.colours()[1:], figures.BACKGROUND_STROKE]
    return pages.render(
        "demo.html.j2",
        verdict=demo.verdict,
        tiles=[(signed(demo.points), "Dice points of difference"), *dice],
        table=table,
        heads=heads,
        rows=[_row(demo, case, rank) for case, rank in chosen_cases(trained[0])],
        legend=list(zip([*labels.foreground, "background stroke"], colours, strict=True)),
        training=[{"name": one.name, "rate": _rate(one), "curves": _curves(one)} for one in trained],
        facts=_facts(demo),
    )


def chosen_cases(one: Trained) -> list[tuple[str, str]]:
    """Best, median and worst case by mean Dice; all cases if there are fewer than three."""
    values = one.summary.by_case(AVERAGE, "Dice")
    order = sorted((case for case in values if not math.isnan(values[case])), key=lambda case: (-values[case], case))
    places = {0: "best", (len(order) - 1) // 2: "median", len(order) - 1: "worst"} if len(order) > 2 else {}
    return [(order[place], word) for place, word in places.items()] or [(case, "") for case in order]


def _row(demo: Demo, case: str, rank: str) -> Row:
    """The slice with the most foreground: image, scribble, each method's labels and entropy, dense mask."""
    dataset, labels = demo.dataset, demo.dataset.labels
    truth = dataset.read_reference(case)[0]
    z = int((truth > 0).sum(axis=(1, 2)).argmax())
    base = figures.base(dataset.read_image(case), z)
    cells = [
        _picture(base, f"image of {case}"),
        _picture(figures.paint(base, dataset.read_scribble(case)[0][z], labels, 1.0), "scribble"),
    ]
    for one in demo.trained:
        file = f"{case}{dataset.ending}"
        predicted = read_labels(one.predictions / file)[0][z]
        entropy = read_image(one.predictions / FOLDER / file).array[0, z]
        shown = figures.outline(figures.paint(base, predicted, labels), truth[z])
        cells += [_picture(shown, f"prediction of {one.name}"), _picture(figures.heat(entropy), "uncertainty")]
    cells.append(_picture(figures.paint(base, truth[z], labels), "dense mask"))
    word = f"{rank.capitalize()} case of {demo.trained[0].name}: " if rank else ""
    where = ", ".join(filter(None, (case, figures.slice_name(z, len(truth)))))
    dice = ", ".join(f"{one.name} {100 * one.summary.by_case(AVERAGE, 'Dice')[case]:.1f}" for one in demo.trained)
    return Row(cells, f"{word}{where}. Dice of the case: {dice}")


def _picture(array: Any, name: str) -> Picture:
    return Picture(name, pages.data_uri(array), array.shape[1], array.shape[0])


def _rate(one: Trained) -> str:
    return f"{one.steps} steps in {one.seconds:.0f} s, {one.steps / max(one.seconds, 1e-9):.1f} per second"


def _curves(one: Trained) -> list[Any]:
    lines = one.curves()
    names = [name for name in (lines[-1] if lines else {}) if name.startswith("loss")]
    if len(names) == 2:
        names = names[1:]  # a single term is the total
    drawn = []
    for name in names:
        title = TERMS.get(name, name.removeprefix("loss/"))
        points = np.array([(line["step"], line[name]) for line in lines if name in line]).T
        drawn.append(pages.svg(figures.loss_curve(points[0], points[1], title), title))
    return drawn


def _facts(demo: Demo) -> list[tuple[str, str]]:
    fold, environment = demo.dataset.fold(FOLD), demo.environment
    drawn = sum(share.share for share in check(demo.dataset, fold.train).classes)
    threads = int(environment["threads"])
    return [
        ("Training data", f"{len(fold.train)} volumes; {100 * drawn:.1f} % of their pixels carry a stroke"),
        ("Test data", f"{len(fold.test)} volumes of other patients, used after training only"),
        ("Shared by both", "scribbles, encoder, CNN decoder, augmentation, optimiser, training time"),
        ("Recipe and seed", f"{demo.to_json()['recipe']}, seed {demo.seed}"),
        ("Machine", f"{environment['device'].upper()} with {threads} thread{'s'[: threads > 1]}"),
        ("Time", f"{demo.seconds:.0f} s in all, of them {demo.budget:g} s of training for each method"),
        ("Software", f"pclmix {environment['pclmix']}, torch {environment['packages']['torch']}"),
        ("To repeat", f"pclmix demo --out {demo.root.name} --overwrite --seed {demo.seed}"),
    ]

"""The demo's report.html: scores, predictions of three held-out volumes, loss curves, settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pclmix.data.check import check
from pclmix.inference.uncertainty import FOLDER
from pclmix.io.volume import read_image, read_labels
from pclmix.metrics.summary import AVERAGE
from pclmix.report import figures, html, panels, tables
from pclmix.report.runs import Run
from pclmix.studies.demo import FOLD, Demo, Trained, signed

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
    colours = [*labels.colours()[1:], panels.BACKGROUND_STROKE]
    return html.render(
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
    """Best, median and worst case by mean Dice, each with that word; all cases where there are fewer than three."""
    values = one.summary.by_case(AVERAGE, "Dice")
    order = sorted((case for case in values if not math.isnan(values[case])), key=lambda case: (-values[case], case))
    places = {0: "best", (len(order) - 1) // 2: "median", len(order) - 1: "worst"} if len(order) > 2 else {}
    return [(order[place], word) for place, word in places.items()] or [(case, "") for case in order]


def _row(demo: Demo, case: str, rank: str) -> Row:
    """The slice with the most foreground: image, scribble, each method's labels and entropy, dense mask."""
    dataset, labels = demo.dataset, demo.dataset.labels
    truth = dataset.read_reference(case)[0]
    z = int((truth > 0).sum(axis=(1, 2)).argmax())
    base = panels.base(dataset.read_image(case), z)
    cells = [
        _picture(base, f"image of {case}"),
        _picture(panels.paint(base, dataset.read_scribble(case)[0][z], labels, 1.0), "scribble"),
    ]
    for one in demo.trained:
        file = f"{case}{dataset.ending}"
        predicted = read_labels(one.predictions / file)[0][z]
        entropy = read_image(one.predictions / FOLDER / file).array[0, z]
        shown = panels.outline(panels.paint(base, predicted, labels), truth[z])
        cells += [_picture(shown, f"prediction of {one.name}"), _picture(panels.heat(entropy), "uncertainty")]
    cells.append(_picture(panels.paint(base, truth[z], labels), "dense mask"))
    word = f"{rank.capitalize()} case of {demo.trained[0].name}: " if rank else ""
    where = ", ".join(filter(None, (case, panels.slice_name(z, len(truth)))))
    dice = ", ".join(f"{one.name} {100 * one.summary.by_case(AVERAGE, 'Dice')[case]:.1f}" for one in demo.trained)
    return Row(cells, f"{word}{where}. Dice of the case: {dice}")


def _picture(array: Any, name: str) -> Picture:
    return Picture(name, html.data_uri(array), array.shape[1], array.shape[0])


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
        drawn.append(html.svg(figures.loss_curve(points[0], points[1], title), title))
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

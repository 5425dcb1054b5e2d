"""The demo's report: one HTML file that opens offline, in light and dark, without a script."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np
import torch

from pclmix.evaluate import Statistic
from pclmix.labels import IGNORE, Labels
from pclmix.losses.uncertainty import entropy
from pclmix.predict.base import Predictor
from pclmix.predict.model import load
from pclmix.report import panels
from pclmix.report.curves import curve
from pclmix.report.demo import FOLD, Demo, Trained
from pclmix.report.significance import AVERAGE, case_values
from pclmix.report.style import STYLE

#: Terms of metrics.jsonl as a reader knows them.
TERMS = {
    "loss": "total loss",
    "loss/sup": "supervised, eq. 4",
    "loss/ctr": "contrast, eq. 8",
    "loss/het": "consistency between decoders, eq. 9",
    "loss/mix": "consistency under mixing, eq. 12",
    "loss/pce": "partial cross-entropy, eq. 3",
}


def render(demo: Demo) -> str:
    """The whole page."""
    ours, other = demo.trained
    parts = [
        _headline(demo),
        _section("Scores on held-out patients", _table(demo), _table_note(demo)),
        _section("What both networks see", _pictures(demo), _picture_note(demo.dataset.labels)),
        _section("Training", *(_curves(one) for one in demo.trained)),
        _section("How this was made", _facts(demo)),
    ]
    title = f"PCLMix demo: {ours.name} and {other.name}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def verdict(demo: Demo) -> str:
    """One sentence: who is ahead, by how much, and how sure that is."""
    ours, other = demo.trained
    interval = demo.difference.mean["Dice"]
    side = "ahead of" if demo.points >= 0 else "behind"
    sure = ""
    if not math.isnan(interval.low):
        sure = f"; 95 % interval of the difference {signed(100 * interval.low)} to {signed(100 * interval.high)}"
    return (
        f"After {demo.budget:g} seconds of training each, from the same scribbles, {ours.name} is "
        f"{abs(demo.points):.1f} Dice points {side} {other.name.lower()} on {demo.difference.patients} patients that "
        f"neither has seen ({100 * ours.summary.mean('Dice').mean:.1f} against "
        f"{100 * other.summary.mean('Dice').mean:.1f}{sure})."
    )


def signed(value: float) -> str:
    """One decimal with its sign, the minus as printers set it.

    >>> signed(5.04), signed(-0.31)
    ('+5.0', '−0.3')
    """
    return f"{value:+.1f}".replace("-", "−")


def _headline(demo: Demo) -> str:
    ours, other = demo.trained
    tiles = [(signed(demo.points), "Dice points of difference")]
    tiles += [(f"{100 * one.summary.mean('Dice').mean:.1f}", f"{one.name}, mean Dice, %") for one in (ours, other)]
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{html.escape(name)}</span></div>' for value, name in tiles)
    return (
        "<header><p class='kicker'>Segmentation from scribbles</p><h1>PCLMix demo</h1>"
        f"<p class='lead'>{html.escape(verdict(demo))}</p><div class='tiles'>{shown}</div>"
        "<p class='small'>The images are a phantom: a heart-like figure made by the program. They show how the methods "
        "differ, not how well either does on patients.</p></header>"
    )


def _section(title: str, *content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(content)}</section>"


def _table(demo: Demo) -> str:
    """Dice and HD95 for each class and all together; the better of each column is bold."""
    columns = (*demo.trained[0].summary.names, AVERAGE)
    titles = [*columns[:-1], "all classes"]
    groups = "".join(f'<th colspan="2" scope="colgroup">{html.escape(title)}</th>' for title in titles)
    heads = "<th scope='col'>Dice, %</th><th scope='col'>HD95, mm</th>" * len(columns)
    stats = {
        (one.method, column, measure): _statistic(one, column, measure)
        for one in demo.trained
        for column in columns
        for measure in ("Dice", "HD95")
    }
    rows = []
    for one in demo.trained:
        cells = []
        for column in columns:
            for measure, scale in (("Dice", 100.0), ("HD95", 1.0)):
                mine = stats[one.method, column, measure]
                theirs = next(stats[o.method, column, measure] for o in demo.trained if o.method != one.method)
                best = mine.mean > theirs.mean if measure == "Dice" else mine.mean < theirs.mean
                text = "–" if math.isnan(mine.mean) else f"{scale * mine.mean:.1f}"
                spread = "" if math.isnan(mine.mean) else f" <span class='sd'>({scale * mine.sd:.1f})</span>"
                cells.append(f"<td>{f'<b>{text}</b>' if best else text}{spread}</td>")
        rows.append(f"<tr><th scope='row'>{html.escape(one.name)}</th>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><td></td>{groups}</tr><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _statistic(one: Trained, column: str, measure: str) -> Statistic:
    return one.summary.mean(measure) if column == AVERAGE else one.summary.of_class(column, measure)


def _table_note(demo: Demo) -> str:
    count = len(demo.trained[0].summary.cases)
    notes = [
        f"Mean (standard deviation) over {count} volumes of {demo.difference.patients} held-out patients. Dice: "
        "overlap with the truth, more is better. HD95: the distance within which 95 % of the two surfaces lie of each "
        "other, less is better. Better value in bold."
    ]
    for one in demo.trained:
        empty = sum(one.summary.statuses(name)["empty prediction"] for name in one.summary.names)
        if empty:
            notes.append(f"{one.name} left a class empty {empty} time{'s' if empty > 1 else ''}: Dice 0, no HD95.")
    return f"<p class='small'>{html.escape(' '.join(notes))}</p>"


def _pictures(demo: Demo) -> str:
    """A row for the best, the middle and the worst held-out volume of PCLMix, each at its largest slice."""
    predictors = [load(one.run, device="cpu") for one in demo.trained]
    heads = ["image", "scribble"]
    for one in demo.trained:
        heads += [f"{one.name}", "its uncertainty"]
    rows = [f"<tr>{''.join(f'<th scope=col>{html.escape(head)}</th>' for head in [*heads, 'truth'])}</tr>"]
    for case, rank in chosen_cases(demo.trained[0]):
        rows.append(_picture_row(demo, case, rank, predictors))
    return f'<div class="scroll"><table class="pictures">{"".join(rows)}</table></div>'


def chosen_cases(one: Trained) -> list[tuple[str, str]]:
    """Best, middle and worst case by mean Dice, each with its word; fewer where there are fewer cases."""
    values = case_values(one.summary, AVERAGE, "Dice")
    order = sorted((case for case in values if not math.isnan(values[case])), key=lambda case: (-values[case], case))
    places = {0: "best", (len(order) - 1) // 2: "middle", len(order) - 1: "worst"} if len(order) > 2 else {}
    return [(order[place], word) for place, word in places.items()] or [(case, "") for case in order]


def _picture_row(demo: Demo, case: str, rank: str, predictors: Sequence[Predictor]) -> str:
    labels = demo.dataset.labels
    image = demo.dataset.read_image(case).array
    truth = demo.dataset.read_reference(case)[0]
    scribble = demo.dataset.read_scribble(case)[0]
    z = int((truth > 0).sum(axis=(1, 2)).argmax())
    base = panels.grey(image[0, z])
    cells = [(base, f"image of {case}"), (panels.paint(base, scribble[z], labels, 1.0), "scribble")]
    dice = []
    for one, predictor in zip(demo.trained, predictors, strict=True):
        probabilities = torch.from_numpy(predictor.probabilities(image[:, z : z + 1]))
        predicted = probabilities.argmax(1)[0].numpy()
        shown = panels.outline(panels.paint(base, predicted, labels), truth[z])
        cells += [(shown, f"prediction of {one.name}"), (panels.heat(entropy(probabilities)[0].numpy()), "uncertainty")]
        dice.append(f"{one.name} {100 * case_values(one.summary, AVERAGE, 'Dice')[case]:.1f}")
    cells.append((panels.paint(base, truth[z], labels), "truth"))
    shown_cells = "".join(
        f'<td><img src="{panels.data_uri(picture)}" alt="{html.escape(name, quote=True)}" '
        f'width="{picture.shape[1]}" height="{picture.shape[0]}"></td>'
        for picture, name in cells
    )
    word = f"{rank.capitalize()} volume of {demo.trained[0].name}: " if rank else ""
    caption = f"{word}{case}, slice {z + 1} of {truth.shape[0]}. Dice of the volume: {', '.join(dice)}"
    return f'<tr>{shown_cells}</tr><tr class="caption"><td colspan="{len(cells)}">{html.escape(caption)}</td></tr>'


def _picture_note(labels: Labels) -> str:
    keys = [(name, colour) for name, colour in zip(labels.foreground, labels.colours()[1:], strict=True)]
    keys.append(("background stroke", panels.BACKGROUND_STROKE))
    legend = "".join(f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in keys)
    return (
        f'<p class="legend">{legend}<span><i class="line"></i>edge of the truth</span>'
        '<span><i class="heat"></i>uncertainty, none to two classes equally likely</span></p>'
        "<p class='small'>The scribble is what an expert would have drawn on this slice; it was not used, for these "
        "patients were held out. Training saw such strokes, on other patients, and nothing else. Uncertainty is the "
        "entropy of the prediction (equation 5).</p>"
    )


def _curves(one: Trained) -> str:
    lines = one.curves()
    names = [name for name in (lines[-1] if lines else {}) if name.startswith("loss")]
    if len(names) == 2:
        names = names[1:]  # a single term is the total
    drawn = []
    for name in names:
        pairs = [(line["step"], line[name]) for line in lines if name in line]
        steps, values = zip(*pairs, strict=True)
        drawn.append(curve(steps, values, TERMS.get(name, name.removeprefix("loss/")), one.seconds))
    rate = one.steps / max(one.seconds, 1e-9)
    return (
        f"<h3>{html.escape(one.name)} <small>{one.steps} steps in {one.seconds:.0f} seconds, {rate:.1f} a second"
        f"</small></h3><div class='curves'>{''.join(drawn)}</div>"
    )


def _facts(demo: Demo) -> str:
    dataset, fold = demo.dataset, demo.dataset.fold(FOLD)
    drawn = np.mean([float((dataset.read_scribble(case)[0] != IGNORE).mean()) for case in fold.train])
    environment = demo.environment
    threads = int(environment["threads"])
    facts = {
        "Training data": f"{len(fold.train)} volumes; {100 * drawn:.1f} % of their pixels carry a stroke",
        "Test data": f"{len(fold.test)} volumes of other patients, opened after training",
        "Shared by both": "scribbles, encoder, CNN decoder, augmentation, optimiser, seconds",
        "Recipe and seed": f"{demo.to_json()['recipe']}, seed {demo.seed}",
        "Machine": f"{environment['device'].upper()} with {threads} thread{'s'[: threads > 1]}",
        "Time": f"{demo.seconds:.0f} seconds in all, {demo.budget:g} of them for each training",
        "Software": f"pclmix {environment['pclmix']}, torch {environment['packages']['torch']}",
        "Again": f"pclmix demo --out {demo.root.name} --overwrite --seed {demo.seed}",
    }
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    return f"<dl>{rows}</dl>"

"""Simulated strokes compared with those of annotators, by task: share, length, width, place and pieces.

    python benchmarks/strokes.py MEDSCRIBBLE [--out results/scribbles] [--seeds 3]

MEDSCRIBBLE holds a folder for each task, with images, masks and scribbles_0, _1, _2 by three people: 1 on the
structure, 0 on the background, 255 where nothing is drawn. Strokes of each kind are drawn from every mask. Writes
medscribble.json and medscribble.md.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage
from skimage.morphology import skeletonize

from pclmix.io.files import atomic_path, write_json
from pclmix.io.volume import read_labels, stem_of
from pclmix.labels import IGNORE
from pclmix.synth.scribble import Style, case_rng, simulate

STYLES = {"scribble": Style(), "brush": Style("brush")}
#: The measures and their meaning.
MEASURES = {
    "share": "drawn pixels of the region, %",
    "length": "length of the skeleton over the square root of the structure's area",
    "width": "drawn pixels over the length of the skeleton",
    "place": "structure: median depth of the strokes over the largest depth; background: median distance to the "
    "structure over the square root of its area",
    "pieces": "connected pieces",
    "wrong": "drawn pixels outside the region, %",
}


def measure(strokes: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The MEASURES of the strokes on the structure and on the background of one picture, where there are any."""
    structure = mask > 0
    size = float(np.sqrt(structure.sum()))
    found = {}
    for name, k, region in (("structure", 1, structure), ("background", 0, ~structure)):
        drawn = strokes == k
        if not drawn.any():
            continue
        length = max(1, int(skeletonize(drawn).sum()))
        if k:
            depth = ndimage.distance_transform_edt(np.pad(region, 1))[1:-1, 1:-1]
            place = float(np.median(depth[drawn])) / float(depth.max())
        else:
            place = float(np.median(ndimage.distance_transform_edt(~structure)[drawn])) / size
        share, wrong = 100 * drawn.sum() / region.sum(), 100 * (drawn & ~region).sum() / drawn.sum()
        pieces = ndimage.label(drawn, np.ones((3, 3)))[1]
        found[name] = np.array([share, length / size, drawn.sum() / length, place, pieces, wrong])
    return found


def compare(task: Path, seeds: int) -> list[dict[str, Any]]:
    """A row for the structure and one for the background: means over pictures, people and seeds."""
    values: dict[tuple[str, str], list[np.ndarray]] = {}
    for path in sorted((task / "masks").iterdir()):
        mask = read_labels(path)[0][0]
        for folder in sorted(task.glob("scribbles_*")):
            drawn = read_labels(folder / path.name)[0][0].astype(np.int16)
            for name, row in measure(np.where(drawn > 1, IGNORE, drawn), mask).items():
                values.setdefault((name, "people"), []).append(row)
        for kind, style in STYLES.items():
            for seed in range(seeds):
                made = simulate(mask[None], style, case_rng(seed, stem_of(path)))[0]
                for name, row in measure(made, mask).items():
                    values.setdefault((name, kind), []).append(row)
    return [
        {"task": task.name, "region": name}
        | {
            who: dict(zip(MEASURES, np.mean(values[name, who], axis=0).round(4).tolist(), strict=True))
            for who in ("people", *STYLES)
        }
        for name in ("structure", "background")
    ]


def table(rows: Sequence[dict[str, Any]], commit: str, seeds: int) -> str:
    who = ("people", *STYLES)
    lines = [
        "# Strokes of people and of the simulator",
        "",
        f"MedScribble: {len(rows) // 2 - 1} tasks, three people each, and the simulator on the same masks with {seeds} "
        f"seeds; commit {commit}; written by `benchmarks/strokes.py`. Each cell: {', '.join(who)}. "
        + " ".join(f"{name.capitalize()}: {text}." for name, text in MEASURES.items()),
        "",
        f"| task | region | {' | '.join(MEASURES)} |",
        f"|---|---|{'---|' * len(MEASURES)}",
    ]
    for row in rows:
        cells = [", ".join(f"{row[w][m]:.3g}" for w in who) for m in MEASURES]
        lines.append(f"| {row['task']} | {row['region']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both regions' medians over the tasks."""
    return [
        {"task": "median", "region": region}
        | {
            who: {m: float(np.median([r[who][m] for r in rows if r["region"] == region])) for m in MEASURES}
            for who in ("people", *STYLES)
        }
        for region in ("structure", "background")
    ]


def agreement(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each measure: the median ratio of brush strokes to people's, and the tasks where it is 0.5 to 2."""
    lines = ["| region | measure | brush / people, median | within a factor of two |", "|---|---|---:|---|"]
    for region in ("structure", "background"):
        for m in list(MEASURES)[:-1]:
            own = [r for r in rows if r["region"] == region and r["task"] != "median"]
            ratio = {r["task"]: r["brush"][m] / r["people"][m] for r in own}
            off = ", ".join(f"{task} {value:.2f}" for task, value in ratio.items() if not 0.5 <= value <= 2)
            held = sum(0.5 <= value <= 2 for value in ratio.values())
            shown = f"{held} of {len(ratio)} tasks" + (f"; not {off}" if off else "")
            lines.append(f"| {region} | {m} | {np.median(list(ratio.values())):.2f} | {shown} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/scribbles"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = [row for task in sorted(options.folder.iterdir()) for row in compare(task, options.seeds)]
    rows += medians(rows)
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    text = table(rows, commit.stdout.strip() or "unknown", options.seeds)
    text += "\n" + "\n".join(agreement(rows)) + "\n"
    write_json(options.out / "medscribble.json", {"seeds": options.seeds, "measures": MEASURES, "rows": rows})
    with atomic_path(options.out / "medscribble.md") as path:
        path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

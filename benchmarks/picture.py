"""The picture of the README, from a finished demo: `python benchmarks/picture.py demo docs/demo.jpg`.

Phantom data only. Rows are two held-out volumes; columns image, scribble, both methods' predictions, truth.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pclmix.data.dataset import Dataset
from pclmix.io.volume import read_labels
from pclmix.report import figures
from pclmix.studies.demo import DATASET, FOLD, METHODS, NAMES

GAP, HEAD, SIDE = 8, 32, 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path, help="a folder that `pclmix demo` made")
    parser.add_argument("out", type=Path, help="the JPEG to write")
    arguments = parser.parse_args()
    dataset = Dataset.open(arguments.demo / DATASET)
    test = sorted(dataset.fold(FOLD).test)
    rows = [_row(arguments.demo, dataset, case) for case in (test[0], test[-1])]
    heads = ["image", "scribble", *(NAMES[method] for method in METHODS), "truth"]
    wide, high = len(heads) * (SIDE + GAP) + GAP, HEAD + len(rows) * (SIDE + GAP)
    sheet = Image.new("RGB", (wide, high), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=20)
    for column, head in enumerate(heads):
        left = GAP + column * (SIDE + GAP)
        draw.text((left + SIDE / 2, HEAD / 2), head, fill="#1c2430", font=font, anchor="mm")
        for line, row in enumerate(rows):
            sheet.paste(row[column], (left, HEAD + line * (SIDE + GAP)))
    # JPEG with full colour resolution: noise makes a PNG three times as large, and a palette loses thin strokes.
    sheet.save(arguments.out, "JPEG", quality=85, subsampling=0, optimize=True)


def _row(demo: Path, dataset: Dataset, case: str) -> list[Image.Image]:
    """The slice with the largest part of the heart, square, as pictures."""
    truth = dataset.read_reference(case)[0]
    z = int((truth > 0).sum(axis=(1, 2)).argmax())
    base = figures.base(dataset.read_image(case), z)
    shown = [base, figures.paint(base, dataset.read_scribble(case)[0][z], dataset.labels, 1.0)]
    for method in METHODS:
        predicted, _ = read_labels(demo / method / "predictions" / f"{case}.nii.gz")
        shown.append(figures.outline(figures.paint(base, predicted[z], dataset.labels), truth[z]))
    shown.append(figures.paint(base, truth[z], dataset.labels))
    side = min(base.shape[:2])
    top, left = ((n - side) // 2 for n in base.shape[:2])
    return [
        Image.fromarray((255 * np.clip(p[top : top + side, left : left + side], 0, 1)).round().astype(np.uint8)).resize(
            (SIDE, SIDE), Image.Resampling.LANCZOS
        )
        for p in shown
    ]


if __name__ == "__main__":
    main()

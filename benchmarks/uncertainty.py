"""Quality of a run's uncertainty on a test fold: entropy detects wrong pixels, certainty ranks cases.

AUROC of the entropy (equation 5) for pixels whose label is wrong, over all pixels and over those within five pixels of
the heart, predicted or true; Spearman's rank correlation with the true mean Dice over the cases, of the certainty and
of the expected Dice, and the mean absolute gap of the latter. Measured with both decoders where the checkpoint has
them, and with the CNN alone.

    python benchmarks/uncertainty.py RUN ACDC --fold 1 --out results/uncertainty/acdc_fold1.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_dilation
from scipy.stats import spearmanr

from pclmix.data.dataset import Dataset
from pclmix.export.compare import overlap
from pclmix.inference.predictor import Predictor
from pclmix.inference.torch import load
from pclmix.training.log import environment

BINS = 4096  # of entropy: the AUROC is exact up to ties within a bin
NEAR = 5  # pixels around the heart
Array = npt.NDArray[Any]


def auroc(wrong: Array, right: Array) -> float:
    """The chance that a wrong pixel has a higher entropy than a right one, from two histograms; ties count half."""
    below = np.concatenate([[0], np.cumsum(right)[:-1]])
    return float((wrong * (below + 0.5 * right)).sum() / (wrong.sum() * right.sum()))


def measure(predictor: Predictor, dataset: Dataset, cases: list[str]) -> dict[str, Any]:
    count = dataset.labels.count
    top = np.log(count) + 1e-3
    histograms = np.zeros((2, 2, BINS))  # everywhere or near the heart, right or wrong
    rows = []
    for case in cases:
        reference = dataset.read_reference(case)[0]
        found = predictor.examine(dataset.read_image(case).array)
        place = np.minimum((np.clip(found.entropy, 0, top) / top * BINS).astype(int), BINS - 1)
        wrong = found.labels != reference
        plane = np.zeros((3, 3, 3), dtype=bool)
        plane[1] = True  # distances within the slice, since slices are far apart
        near = binary_dilation((found.labels > 0) | (reference > 0), plane, iterations=NEAR)
        for region, chosen in enumerate((np.ones_like(near), near)):
            for kind, group in enumerate((chosen & ~wrong, chosen & wrong)):
                histograms[region, kind] += np.bincount(place[group], minlength=BINS)
        shared, sizes = overlap(found.labels, reference, count)[:, 1:]
        true = float(np.mean(shared[sizes > 0] / sizes[sizes > 0]))
        said = {"certainty": found.quality.certainty, "expected_dice": found.quality.expected_dice}
        rows.append({"case": case, **said, "dice": true, "wrong": float(wrong.mean())})
    estimates, expected, dice = ([row[key] for row in rows] for key in ("certainty", "expected_dice", "dice"))
    rank = spearmanr(estimates, dice)
    return {
        "auroc": auroc(histograms[0, 1], histograms[0, 0]),
        "auroc_near_heart": auroc(histograms[1, 1], histograms[1, 0]),
        "spearman": float(rank.statistic),
        "spearman_p": float(rank.pvalue),
        "spearman_expected_dice": float(spearmanr(expected, dice).statistic),
        "expected_dice_gap": float(np.mean(np.abs(np.subtract(expected, dice)))),
        "mean_expected_dice": float(np.mean(expected)),
        "mean_dice": float(np.mean(dice)),
        "temperature": predictor.about.temperature,
        "cases": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--fold", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dataset = Dataset.open(args.dataset)
    cases = [case for case in dataset.fold(args.fold).test if dataset.has_reference(case)]
    both, alone = (load(args.run, device=args.device, precision="32") for _ in range(2))
    alone.second = None
    result = {"cnn": measure(alone, dataset, cases)}
    if both.second is not None:
        result["both_decoders"] = measure(both, dataset, cases)
    for name, figures in result.items():
        print(name, {key: round(value, 4) for key, value in figures.items() if isinstance(value, float)}, flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"fold": args.fold, **result, "environment": environment(args.device)}
        args.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Speed of HD95: ours, a naive one over the whole volume, and medpy's if installed, in one run.

    python benchmarks/hd95.py [--masks FOLDER] [--repeats 5]

FOLDER holds dense cardiac masks (`*_gt.nii.gz`, any depth). Without it, ellipsoid shells of the same size stand in.
Each reference is scored against itself shifted by a few pixels, once as it is and once with two stray islands, as a
network leaves them. Written to results/hd95/.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
from scipy import ndimage

from pclmix.io.files import write_json
from pclmix.io.volume import read_labels
from pclmix.metrics.functional import hd95

RESULT = Path(__file__).parents[1] / "results" / "hd95" / "hd95.json"


def straightforward(prediction, reference, spacing):
    """Two erosions and a distance transform of the whole volume in each direction."""
    cross = ndimage.generate_binary_structure(prediction.ndim, 1)

    def directed(a, b):
        edge_a, edge_b = (m ^ ndimage.binary_erosion(m, cross) for m in (a, b))
        return ndimage.distance_transform_edt(~edge_b, sampling=spacing)[edge_a]

    return np.percentile(np.hstack((directed(prediction, reference), directed(reference, prediction))), 95)


def real_masks(folder: Path):
    for path in sorted(folder.rglob("*_gt.nii.gz")):
        labels, geometry = read_labels(path)
        for k in range(1, int(labels.max()) + 1):
            if (labels == k).any():
                yield labels == k, geometry.spacing


def ellipsoids():
    """Twelve balls and shells in 10 x 256 x 216 voxels of 10 x 1.5625 x 1.5625 mm."""
    z, y, x = np.mgrid[:10, :256, :216]
    for seed in range(12):
        radius = 18 + seed
        ball = ((z - 5) * 4) ** 2 + (y - 120 - seed) ** 2 + (x - 100) ** 2 < radius**2
        hole = ((z - 5) * 4) ** 2 + (y - 120 - seed) ** 2 + (x - 100) ** 2 < (radius - 7) ** 2
        yield ball & ~hole if seed % 2 else ball, (10.0, 1.5625, 1.5625)


def prediction_of(reference, stray: bool):
    moved = np.roll(reference, (0, 2, 1), axis=(0, 1, 2))
    if stray:
        moved[0, 3:8, 3:8] = moved[-1, -9:-2, -9:-2] = True
    return moved


def measure(functions, pairs, repeats: int):
    """Median over repeats of the milliseconds per mask; the functions alternate, so that load affects all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            for prediction, reference, spacing in pairs:
                function(prediction, reference, spacing)
            times[name].append((time.perf_counter() - start) / len(pairs) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--masks", type=Path, help="folder with *_gt.nii.gz")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    masks = list(real_masks(arguments.masks)) if arguments.masks else list(ellipsoids())
    if not masks:
        parser.error(f"{arguments.masks} holds no *_gt.nii.gz")
    functions = {"pclmix": hd95, "straightforward": straightforward}
    try:
        from medpy.metric.binary import hd95 as medpy_hd95

        functions["medpy"] = lambda p, r, spacing: medpy_hd95(p, r, voxelspacing=spacing)
    except ImportError:
        print("medpy is not installed; compared with the straightforward implementation alone")
    rows = []
    for stray in (False, True):
        pairs = [(prediction_of(mask, stray), mask, spacing) for mask, spacing in masks]
        apart = max(abs(hd95(*pair) - straightforward(*pair)) for pair in pairs)
        assert apart < 1e-6, f"HD95 differs by {apart} mm"
        ms = measure(functions, pairs, arguments.repeats)
        fastest_peer = min(value for name, value in ms.items() if name != "pclmix")
        rows.append(
            {
                "islands": stray,
                "masks": len(pairs),
                "ms": ms,
                "ratio": fastest_peer / ms["pclmix"],
                "largest_difference_mm": apart,
            }
        )
        shown = ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items())
        print(f"{'with islands' if stray else 'as they are '}: {shown}: {rows[-1]['ratio']:.1f}x")
    write_json(
        RESULT,
        {
            "masks": "real cardiac masks (files *_gt.nii.gz)" if arguments.masks else "ellipsoids",
            "shapes": sorted({str(mask.shape) for mask, _ in masks}),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "repeats": arguments.repeats,
            "rows": rows,
        },
    )
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()

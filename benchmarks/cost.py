"""Seconds and peak memory of each command against the number and the size of images, on a CPU.

    python benchmarks/cost.py results/cost --work /tmp/cost 200-small 2000-small 20000-small
    python benchmarks/cost.py results/cost --work /tmp/cost 2-volumes 2-pictures

Each name is a dataset that is made first, of random images with a stroke of each class: `small` are volumes of
4 x 32 x 32, `volumes` of 300 x 512 x 512, `pictures` are 4,000 x 4,000. Commands run one at a time in processes of
their own: import, check, plan, train (30 steps of recipe tiny, its preparation included; then the seconds of a step
alone) and predict. Memory is the most that a process held. OUT/NAME.json is written after every command; what it has
is not measured again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix.io.files import read_json, write_json
from pclmix.training.log import environment

SHAPES = {"small": (4, 32, 32), "volumes": (300, 512, 512), "pictures": (1, 4000, 4000)}
IGNORE, STEPS = 2, 30
_CLASSES = "background=0,structure=1"


def make(folder: Path, shape: tuple[int, ...], count: int) -> None:
    """Images and scribbles in two folders, with names that differ; a disc in noise, one stroke in it and one around."""
    for name in ("images", "scribbles"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    _, height, width = shape
    y, x = np.mgrid[:height, :width]
    disc = (y - height / 2) ** 2 + (x - width / 2) ** 2 < (min(height, width) / 4) ** 2
    scribble = np.full(shape, IGNORE, np.uint8)
    middle, reach = height // 2, width // 8
    scribble[:, middle, width // 2 - reach : width // 2 + reach] = 1
    scribble[:, 2, 2:-2] = scribble[:, -3, 2:-2] = scribble[:, :, 2] = scribble[:, :, -3] = 0
    noise = rng.integers(0, 60, shape, dtype=np.uint8)
    for number in range(count):
        image = np.roll(noise, number % 97, axis=2) + np.where(disc, np.uint8(120), np.uint8(20))
        save(folder / "images", f"case{number:05d}", image)
        save(folder / "scribbles", f"case{number:05d}", scribble)


def save(folder: Path, name: str, array: npt.NDArray[np.uint8]) -> None:
    if len(array) == 1:
        Image.fromarray(array[0]).save(folder / f"{name}.png", compress_level=1)
    else:
        nib.save(nib.Nifti1Image(array.transpose(2, 1, 0), np.diag([1.0, 1.0, 5.0, 1.0])), folder / f"{name}.nii.gz")


def measured(command: list[str], cache: Path, limit: float) -> dict[str, Any]:
    """Seconds, seconds of the processor and peak MiB of `pclmix COMMAND`."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pclmix", *command],
            env={**os.environ, "PCLMIX_CACHE": str(cache)},
            stdout=said,
            stderr=said,
        )
        timer = threading.Timer(limit, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
        seconds = time.perf_counter() - began
        if status:
            said.seek(0)
            sys.exit(f"pclmix {' '.join(command)}: status {status}\n{said.read().decode()[-2000:]}")
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(used.ru_maxrss / 1024),
        "shown": f"{seconds:.1f} s, {used.ru_maxrss / 1024:.0f} MiB",
    }


def commands(work: Path) -> dict[str, list[str]]:
    data, run = str(work / "data"), str(work / "run")
    source = [str(work / "source" / "images"), data, "--scribbles", str(work / "source" / "scribbles")]
    return {
        "import": ["import", "folder", *source, "--classes", _CLASSES, "--ignore", str(IGNORE)],
        "check": ["check", data],
        "plan": ["plan", data, "--device", "cpu"],
        "train": ["train", data, "--out", run, "--recipe", "tiny", "--device", "cpu", f"engine.iterations={STEPS}"],
        "predict": ["predict", run, data, str(work / "predictions"), "--device", "cpu"],
    }


def step_seconds(run: Path) -> float:
    """Of training, by the run's own clock."""
    return round(float(read_json(run / "run.json")["seconds"]) / STEPS, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+", metavar="COUNT-SHAPE")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(commands(Path())), help="commands, the others being measured"
    )
    parser.add_argument("--limit", type=float, default=450, help="seconds for a command")
    args = parser.parse_args()
    for name in args.names:
        found = re.fullmatch(rf"(\d+)-({'|'.join(SHAPES)})", name)
        if found is None:
            parser.error(f"{name}: a number and one of {', '.join(SHAPES)}, as in 200-small")
        count, shape, work, path = int(found[1]), SHAPES[found[2]], args.work / name, args.out / f"{name}.json"
        result = read_json(path) if path.is_file() else {"cases": count, "shape": list(shape)}
        if not (work / "source").is_dir():
            make(work / "source", shape, count)
        for key, command in commands(work).items():
            if key in result or (args.only and key not in args.only):
                continue
            result[key] = measured(command, work / "cache", args.limit)
            if key == "train":
                result["step_seconds"] = step_seconds(work / "run")
            print(name, key, result[key]["shown"], flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            write_json(path, {**result, "environment": environment("cpu")})


if __name__ == "__main__":
    main()

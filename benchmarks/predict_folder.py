"""A folder of volumes to label maps: each stage alone, their sum, and the whole as `predict` runs it.

Reading (inflate, scale, resize), network, writing (deflate) are timed alone over the same folder, one after the other
in one thread; then `predict_files`, which overlaps them. With a GPU, or cores to spare, the whole is close to the
slowest stage; on a CPU with two cores all stages share them, and the whole cannot be below their work over two.

    python benchmarks/predict_folder.py RUN --volumes 200 --out results/predict/folder.json
    python benchmarks/predict_folder.py heart.onnx --images data/acdc/imagesTr --volumes 40
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from pclmix.inference import load
from pclmix.inference.files import predict_files
from pclmix.inference.inputs import find_jobs
from pclmix.synth.phantom import make_phantom
from pclmix.training.log import environment


def fill(folder: Path, images: Path | None, volumes: int, work: Path) -> None:
    """A folder with `volumes` images: those given, or the phantom's, copied as often as it takes."""
    if images is None:
        make_phantom(work / "phantom", 6)
        images = work / "phantom" / "imagesTr"
    found = sorted(images.glob("*.nii.gz"))
    folder.mkdir()
    for k in range(volumes):
        shutil.copy(found[k % len(found)], folder / f"volume{k:04d}_0000.nii.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--images", type=Path, help="a folder of .nii.gz; the phantom's where none is given")
    parser.add_argument("--volumes", type=int, default=200)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    predictor = load(args.model, device=args.device)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        fill(work / "in", args.images, args.volumes, work)
        about = predictor.about
        jobs = find_jobs(work / "in", work / "alone", channels=about.channels, labels=about.labels)
        first = predictor.read(jobs[0].images)[0]
        predictor.predict(first)  # warm-up: selects kernels and captures graphs
        stages = {"reading": 0.0, "network": 0.0, "writing": 0.0}
        slices = 0
        for job in jobs:
            marks = [time.perf_counter()]
            array, geometry = predictor.read(job.images)
            batches = list(predictor.batches(array))
            marks.append(time.perf_counter())
            labels = predictor.label(batches, geometry.shape[1:])
            marks.append(time.perf_counter())
            predictor.write(job.out, labels, geometry)
            marks.append(time.perf_counter())
            for stage, begin, end in zip(stages, marks, marks[1:], strict=False):
                stages[stage] += end - begin
            slices += len(labels)
        began = time.perf_counter()
        predict_files(predictor, work / "in", work / "out").require_good()
        total = time.perf_counter() - began
    slowest = max(stages, key=lambda stage: stages[stage])
    result = {
        "volumes": args.volumes,
        "slices": slices,
        "stages_alone_s": {stage: round(seconds, 3) for stage, seconds in stages.items()},
        "sum_of_stages_s": round(sum(stages.values()), 3),
        "slowest_stage": slowest,
        "total_s": round(total, 3),
        "total_over_slowest": round(total / stages[slowest], 3),
        "total_over_sum": round(total / sum(stages.values()), 3),
        "volumes_per_second": round(args.volumes / total, 2),
        "cores": len(os.sched_getaffinity(0)),
    }
    for key, value in result.items():
        print(f"{key:22s} {value}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**result, "environment": environment(args.device)}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""int8 against the eager fp32 model on a CPU: milliseconds per slice in one run, Dice with dense masks, CPU flags.

The export is calibrated on training cases and measured on the test cases of a fold. Eager is the network as it was
trained, in torch; the others are onnxruntime on as many threads. They take turns, slice by slice, so that a busy
machine slows all of them alike. Times are medians of single passes through the network (--size, the model's own where
not given), without reading and resizing.

    python benchmarks/export.py RUN ACDC --fold 1 --threads 2 --out results/export/acdc_fold1.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pclmix.data.dataset import Dataset
from pclmix.export.compare import overlap
from pclmix.export.onnx import export_onnx
from pclmix.inference import load
from pclmix.inference.onnx import INPUT, open_session
from pclmix.training.checkpoint import build_net, open_model
from pclmix.training.log import environment

PRECISIONS = ("fp32", "fp16", "int8")


def cpu() -> dict[str, Any]:
    """Name of the processor and its flags for 8-bit arithmetic."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = [f for f in said.get("flags", "").split() if f.startswith(("avx", "amx", "fma")) or "vnni" in f]
    return {"model": said.get("model name", platform.processor()), "flags": flags}


def clock(paths: dict[str, Path], net: torch.nn.Module, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Median milliseconds per slice of each, measured alternately."""
    image = np.random.default_rng(0).random(shape, dtype=np.float32)
    sessions = {name: open_session(path, "cpu") for name, path in paths.items()}
    tensor = torch.from_numpy(image)
    times: dict[str, list[float]] = {name: [] for name in ("eager", *sessions)}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for name, spent in times.items():
                began = time.perf_counter()
                if name == "eager":
                    net(tensor)
                else:
                    sessions[name].run(None, {INPUT: image})
                if turn >= 2:  # two to warm up
                    spent.append((time.perf_counter() - began) * 1000 / shape[0])
    return {name: float(np.median(spent)) for name, spent in times.items()}


def dice(model: Path, dataset: Dataset, cases: list[str]) -> dict[str, float]:
    """Mean Dice over the foreground classes of each case, at the images' own size."""
    predictor = load(model, device="cpu")
    result = {}
    for case in cases:
        labels = predictor.predict(dataset.read_image(case).array)
        shared, sizes = overlap(labels, dataset.read_reference(case)[0], dataset.labels.count)[:, 1:]
        result[case] = float(np.mean(shared[sizes > 0] / sizes[sizes > 0]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--fold", type=int, default=1)
    parser.add_argument("--cases", type=int, help="the first test cases only")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, help="height and width that are timed")
    parser.add_argument("--batch", type=int, nargs="*", default=(1, 4))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # also limits onnxruntime's sessions
    torch.set_num_threads(args.threads)
    dataset = Dataset.open(args.dataset)
    cases = [case for case in dataset.fold(args.fold).test if dataset.has_reference(case)][: args.cases]
    checkpoint = open_model(args.run)
    net = build_net(checkpoint)
    size = tuple(args.size or checkpoint.config.data.size)
    result: dict[str, Any] = {"cpu": cpu(), "threads": args.threads, "size": size, "fold": args.fold}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.onnx" for name in PRECISIONS}
        result["exports"] = {
            name: export_onnx(args.run, path, precision=name, images=args.dataset)  # type: ignore[arg-type]
            for name, path in paths.items()
        }
        result["milliseconds"] = {}
        for batch in args.batch:
            times = clock(paths, net, (batch, len(checkpoint.channels), *size), args.rounds)
            speed = {f"{name}_speedup": times["eager"] / times[name] for name in PRECISIONS}
            result["milliseconds"][f"batch {batch}"] = {**times, **speed}
            print(f"batch {batch}", {k: round(v, 2) for k, v in {**times, **speed}.items()}, flush=True)
        scores = {"eager": dice(args.run, dataset, cases), "int8": dice(paths["int8"], dataset, cases)}
    means = {name: float(np.mean(list(values.values()))) for name, values in scores.items()}
    result["dice"] = {**means, "change_points": 100 * (means["int8"] - means["eager"]), "cases": scores}
    print("Dice", {k: round(v, 4) for k, v in result["dice"].items() if isinstance(v, float)}, cpu(), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**result, "environment": environment("cpu")}, indent=2) + "\n")


if __name__ == "__main__":
    main()

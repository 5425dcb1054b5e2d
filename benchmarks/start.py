"""Seconds from the command `pclmix train` to the end of the first step: first with an empty cache, then again.

The first command has an empty cache, so that it checks every file and prepares every slice; the second finds both done.
On a machine that has just started, `first` also reads Python's libraries from a cold disk: --import-first avoids
that by importing them beforehand.

    python benchmarks/start.py ACDC --recipe hull --out results/start/h200.json encoder.weights=FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pclmix.nets.segmenter import device_kind
from pclmix.training.log import METRICS, environment

#: Triton is imported where its first kernel is launched.
_LIBRARIES = "import pclmix.training.start, importlib.util as u; u.find_spec('triton') and __import__('triton')"


def seconds_to_first_step(command: list[str], run: Path, cache: Path) -> float:
    """Until the first line of metrics is there; the training is then stopped."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env={**os.environ, "PCLMIX_CACHE": str(cache)}, stderr=said)
        metrics = run / METRICS
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll() is not None:
                said.seek(0)
                sys.exit(said.read().decode()[-2000:])
            time.sleep(0.01)
        taken = time.perf_counter() - began
        process.terminate()
        process.wait()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--fold", type=int, default=1)
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--method", default="pclmix")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--import-first", action="store_true", help="read the libraries once before the clock starts")
    parser.add_argument("--code", default="", help="what is special about this state of the code, for the table")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    if args.import_first:
        subprocess.run([sys.executable, "-c", _LIBRARIES], check=True)
    result: dict[str, object] = {
        "code": args.code,
        "recipe": args.recipe,
        "fold": args.fold,
        "import_first": args.import_first,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "again"):
            run = Path(folder) / name
            command = [sys.executable, "-m", "pclmix", "train", str(args.dataset), "--out", str(run)]
            command += ["--fold", str(args.fold), "--recipe", args.recipe, "--method", args.method]
            command += ["--device", args.device, *args.overrides, "engine.log_every=1"]
            result[f"{name}_s"] = round(seconds_to_first_step(command, run, Path(folder) / "cache"), 2)
            print(name, result[f"{name}_s"], "s", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        content = {**result, "environment": environment(device_kind(args.device))}
        args.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Milliseconds of every method's training step, and of its passes through the network.

The passes are measured in the same run: forward and backward of all that the method trains on one batch, and forward
alone, each times the number of batches given by `Method.passes`. Both are
captured as CUDA graphs on a GPU, so that kernel launches do not count. Feeding, augmentation, losses, label maps,
optimiser and teachers belong to the step and not to the passes; label maps made before training are timed separately.

    python benchmarks/methods.py --out results/methods/h200.json                  # on a GPU: --net resnet50 or unet
    OMP_NUM_THREADS=1 python benchmarks/methods.py --device cpu --net unet --size 64 --batch 4 --steps 2 --precision 32
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pclmix.config import Config, build
from pclmix.data.store import Store
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.methods.base import METHODS, Method, build_method, find_method, load_all
from pclmix.training.feed import Feed
from pclmix.training.log import environment
from pclmix.training.optim import make_optimizer
from pclmix.training.step import Gradients, TrainStep, cast_weights

LIMIT = 1.5
CLASSES = 4


def slices(size: int, count: int) -> tuple[Any, Any]:
    """Blobs of four grey values with one pixel in seventy scribbled."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.random((count, 1, 8, 8), dtype=np.float32))
    images = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1).numpy()
    labels = np.clip((images * CLASSES).astype(np.int16), 0, CLASSES - 1)
    labels[rng.random(labels.shape) > 0.014] = IGNORE
    return images.astype(np.float16), labels


def make_store(method: type[Method], size: int, count: int) -> tuple[Store, float]:
    """Slices with the method's own maps, and the milliseconds that a slice's maps took."""
    images, labels = slices(size, count)
    started = time.process_time()
    # A few are computed and shared by all: their content does not change the step's time.
    maps = [method.precompute(images[n].astype(np.float32), labels[n, 0]) for n in range(2 if method.has_maps() else 0)]
    spent = (time.process_time() - started) / max(len(maps), 1) * 1000
    names = tuple(sorted(maps[0])) if maps else ()
    for name in names:
        labels = np.concatenate([labels, np.broadcast_to(maps[0][name], (count, 1, size, size))], axis=1)
    return Store(images, labels, names, ("case",), np.zeros(count, np.int64), ((1.0, 1.0, 1.0),)), spent


def captured(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`work` as one CUDA graph where there is CUDA."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def milliseconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The best of several rounds of `repeats` calls, after a warm-up: other programs only add time.

    On a CPU it is processor time, to which other programs add little; run it with one thread.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    rounds = []
    for _ in range(4):
        wait()
        started = clock()
        for _ in range(repeats):
            work()
        wait()
        rounds.append((clock() - started) / repeats * 1000)
    return min(rounds[1:])


def time_passes(method: Method, config: Config, device: torch.device, repeats: int) -> tuple[float, float]:
    """Forward and backward, and forward alone, of one batch through all that the method trains."""
    size, bf16 = config.data.size, config.engine.precision == "bf16"
    image = torch.rand(config.engine.batch, 1, *size, device=device).contiguous(memory_format=torch.channels_last)
    parameters = [p for p in method.parameters() if p.requires_grad]

    def forward() -> Any:
        weights = cast_weights(method, torch.bfloat16) if bf16 else nullcontext()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False), weights:
            return method(image)

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        torch.stack([out.float().mean() for out in forward()]).sum().backward()

    @torch.no_grad()
    def infer() -> None:
        forward()

    both = milliseconds(captured(train, device), device, repeats)
    return both, milliseconds(captured(infer, device), device, repeats)


def time_step(method: Method, store: Store, config: Config, device: torch.device, repeats: int) -> float:
    """The whole step as in training."""
    optimizer = make_optimizer(method.parameters(), config.optim, device)
    generator = torch.Generator(device).manual_seed(0)
    feed = Feed(store, config.engine.batch, 0, device)
    gradients = Gradients(method, feed, config, generator)
    step = TrainStep(gradients, optimizer, None, graph=device.type == "cuda")
    for i in range(5):
        step(i, 0.5)
    return milliseconds(lambda: step(0, 0.5), device, repeats)


def measure(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    sections = {
        "method": name,
        "net": args.net,
        "data": {"size": [args.size, args.size]},
        "engine": {"batch": args.batch, "precision": args.precision},
    }
    config = build(Config, sections, "benchmark")
    kind = find_method(name)
    store, maps = make_store(kind, args.size, 4 * args.batch)
    torch.manual_seed(0)
    method = build_method(config, 1, CLASSES, len(store)).to(device, memory_format=torch.channels_last).train()
    both, alone = time_passes(method, config, device, args.steps)
    step = time_step(method, store, config, device, args.steps)
    passes = kind.passes
    floor = passes.trained * both + passes.inferred * alone
    return {
        "method": name,
        "step_ms": step,
        "passes_ms": floor,
        "ratio": step / floor,
        "trained": passes.trained,
        "inferred": passes.inferred,
        "train_pass_ms": both,
        "infer_pass_ms": alone,
        "maps_ms_per_slice": maps if kind.has_maps() else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", help="names; all where none is given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    load_all()
    rows = []
    print(
        f"{'method':10s} {'step ms':>9s} {'passes ms':>10s} {'ratio':>6s}  passes (trained + inferred)   maps ms/slice"
    )
    for name in args.methods or METHODS.names():
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            row = measure(name, args, device)
        except PclmixError as error:
            print(f"{name:10s} left out: {error}")
            continue
        rows.append(row)
        maps = "" if row["maps_ms_per_slice"] is None else f"{row['maps_ms_per_slice']:.0f}"
        sign = "" if row["ratio"] <= LIMIT else "  over the limit"
        print(
            f"{name:10s} {row['step_ms']:9.2f} {row['passes_ms']:10.2f} {row['ratio']:6.2f}  "
            f"{row['trained']:g} + {row['inferred']:g}{'':23s} {maps:>6s}{sign}",
            flush=True,
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"rows": rows, "limit": LIMIT, "settings": vars(args) | {"out": None}}
        args.out.write_text(json.dumps({**result, "environment": environment(str(device))}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Milliseconds of one whole PCLMix training step, eager and as one CUDA graph, and the lower bounds of the machine.

Everything counts: feeding, augmentation, mixing, 3B images through both decoders, losses, backward, optimiser,
weight average and queue. Two lower bounds: arithmetic (operations of convolutions, products and attention over the
measured rate of a large bf16 product) and memory (the bytes those same operations must read and write, everything else
fused into them, over the measured rate of a large copy).

    python benchmarks/step.py --out results/step/h200.json            # on a GPU
    python benchmarks/step.py --device cpu --net resnet18 --size 64 --batch 4 --steps 2
"""

from __future__ import annotations

import argparse
import json
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pclmix.config import Config, build
from pclmix.data.store import Store
from pclmix.kernels import OPERATIONS, plain
from pclmix.labels import IGNORE
from pclmix.methods.base import build_method
from pclmix.training.feed import Feed
from pclmix.training.log import environment
from pclmix.training.optim import WeightAverage, make_optimizer
from pclmix.training.parallel import join
from pclmix.training.step import Gradients, TrainStep

_HEAVY = ("convolution", "mm", "attention", "_flash", "_efficient", "linear")


class TrafficCounter(TorchDispatchMode):
    """Bytes in and out of the operations that no fusion can remove."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in _HEAVY):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


def fake_store(size: int, slices: int, classes: int = 4) -> Store:
    """Random slices with about one pixel in a hundred scribbled."""
    rng = np.random.default_rng(0)
    images = rng.random((slices, 1, size, size), dtype=np.float32).astype(np.float16)
    labels = rng.integers(0, classes, (slices, 1, size, size)).astype(np.int16)
    labels[rng.random(labels.shape) > 0.014] = IGNORE
    return Store(images, labels, (), ("case",), np.zeros(slices, np.int64), ((1.0, 1.0, 1.0),))


def make_step(config: Config, store: Store, device: torch.device, graph: bool) -> TrainStep:
    """A step on random slices; under torchrun on one process it goes through DistributedDataParallel and NCCL."""
    torch.manual_seed(0)
    method = build_method(config, 1, 4, len(store)).to(device, memory_format=torch.channels_last).train()
    optimizer = make_optimizer(method.parameters(), config.optim, device)
    average = WeightAverage(method, config.engine.ema)
    generator = torch.Generator(device).manual_seed(0)
    feed = Feed(store, config.engine.batch, 0, device)
    gradients = Gradients(method, feed, config, generator)
    if dist.is_initialized():
        gradients.average_over_ranks()
    return TrainStep(gradients, optimizer, average, graph)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_steps(step: TrainStep, device: torch.device, steps: int) -> float:
    """Milliseconds per step, after warm-up, over `steps` steps."""
    for i in range(6):
        step(i, 0.5)
    wait(device)
    started = time.perf_counter()
    for i in range(steps):
        step(i, 0.5)
    wait(device)
    return (time.perf_counter() - started) / steps * 1000


def rates(device: torch.device) -> tuple[float, float]:
    """Measured FLOP/s of a large bf16 product and bytes/s (read plus written) of a large copy."""
    n, m = (8192, 2**31) if device.type == "cuda" else (512, 2**26)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(m, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def best(work: Any) -> float:
        times = []
        for _ in range(8):
            wait(device)
            started = time.perf_counter()
            work()
            wait(device)
            times.append(time.perf_counter() - started)
        return min(times)

    return 2 * n**3 / best(lambda: a @ b), 2 * m / best(lambda: target.copy_(source))


#: The kind of a kernel: the first one with a pattern in the kernel's name.
_KINDS = {
    "attention": "fmha|flash|attention",
    "losses": "softmax|SoftMax|nll|mse",
    "linear bias, squared norm": "bias_gradient|squared_norm",
    "convolution": "conv|fprop|dgrad|wgrad|implicit|nhwcTo|nchwTo|cudnn",
    "matrix product": "gemm|cutlass|nvjet|cublas|splitK|wgmma|gemv",
    "normalisation": "batch_norm|layer_norm|LayerNorm",
    "optimiser": "fused_sgd|FusedSgd|FusedAdam|Sgd|multi_tensor|lerp",
    "upsampling": "upsample|max_pool",
    "copies and casts": "copy|Cat|roll|cat_array|Memcpy|Memset|fill|index",
    "reductions": "reduce|norm|sum",
    "sorting": "sort|Sort|scan|Scan|radix|Radix",
}


def kind(kernel: str) -> str:
    return next((name for name, pattern in _KINDS.items() if re.search(pattern, kernel)), "elementwise and other")


def profile(step: TrainStep, rows: int) -> str:
    """Device time of an eager step by kind of kernel, then by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as record:
        for i in range(3):
            step(i, 0.5)
        torch.cuda.synchronize()
    events = [e for e in record.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 3000
    kinds: dict[str, list[float]] = {}
    for e in events:
        kinds.setdefault(kind(e.key), []).append(e.self_device_time_total / 3000)
    lines = [f"device time {total:.2f} ms a step"]
    lines += [f"{sum(t):8.3f} ms {name}" for name, t in sorted(kinds.items(), key=lambda item: -sum(item[1]))]
    lines += [f"{e.self_device_time_total / 3000:8.3f} ms {e.count / 3:6.0f}x  {e.key[:150]}" for e in events[:rows]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--profile", type=int, default=0, help="print this many kernels of the eager step")
    parser.add_argument("--search", action="store_true", help="let cuDNN time its algorithms for each convolution")
    parser.add_argument("--without", nargs="+", default=[], choices=OPERATIONS, help="fused operations to leave plain")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with join(args.device), plain(*args.without) if args.without else nullcontext():
        measure(args)


def measure(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = args.search
    sections = {
        "net": args.net,
        "data": {"size": [args.size, args.size]},
        "engine": {"batch": args.batch, "ema": 0.99, "precision": args.precision},
    }
    config = build(Config, sections, "benchmark")
    store = fake_store(args.size, 64)
    flops_rate, copy_rate = rates(device)

    step = make_step(config, store, device, graph=False)
    eager = time_steps(step, device, max(2, args.steps // 4))
    if args.profile and device.type == "cuda":
        print(profile(step, args.profile), flush=True)
    # Counted on the plain operations: neither counter sees inside fused ones.
    with plain(), FlopCounterMode(display=False) as operations:
        step(0, 0.5)
    with plain(), TrafficCounter() as traffic:
        step(0, 0.5)
    del step
    graph, peak = None, None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        graph = time_steps(make_step(config, store, device, graph=True), device, args.steps)
        peak = torch.cuda.max_memory_allocated() / 2**30
    best = graph if graph is not None else eager
    floors = {
        "arithmetic_ms": operations.get_total_flops() / flops_rate * 1000,
        "memory_ms": traffic.bytes / copy_rate * 1000,
    }
    result = {
        "eager_ms": eager,
        "graph_ms": graph,
        "images_per_second": 3 * args.batch / best * 1000,
        "peak_memory_gib": peak,
        "tflop": operations.get_total_flops() / 1e12,
        "gigabytes": traffic.bytes / 1e9,
        "tflops_measured": flops_rate / 1e12,
        "copy_gb_per_s": copy_rate / 1e9,
        **floors,
        "share_of_floor": max(floors.values()) / best,
        "settings": vars(args) | {"out": None},
        "environment": environment(str(device)),
    }
    for key, value in result.items():
        if isinstance(value, float):
            print(f"{key:20s} {value:10.3f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

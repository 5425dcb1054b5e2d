"""Milliseconds per slice from prepared slices to a label map at native size: encoder and CNN decoder alone.

Whole volumes, files left out. On a GPU the slices are on it already and the label maps stay there; eager and captured
graphs, fp32 and bf16, with and without flips are timed in one run, beside the plain model. On a CPU the predictor is
timed against the plain eager fp32 model, one slice at a time. The plain model is the network as it was trained, its
BatchNorm not folded, in the default memory layout.

    python benchmarks/predict.py --out results/predict/h200.json            # on a GPU
    python benchmarks/predict.py --device cpu --volumes 2 --out results/predict/cpu.json
    python benchmarks/predict.py --device cpu --net resnet18 --size 64 --volumes 2 --slices 3
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pclmix.data.preprocess import linear_matrix
from pclmix.inference.predictor import About
from pclmix.inference.torch import BATCH, TorchPredictor
from pclmix.labels import Labels
from pclmix.nets.segmenter import build_segmenter, device_kind
from pclmix.training.log import environment

CLASSES = Labels(("background", "RV", "Myo", "LV"), None)


def trained_like(net: nn.Module) -> nn.Module:
    """Random running statistics, so that folding BatchNorm has an effect."""
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return net.eval()


@torch.inference_mode()
def plain(net: nn.Module, volume: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The simplest way: one slice at a time, logits resized, argmax."""
    return torch.cat([(rows @ net(volume[z : z + 1]) @ columns).argmax(1) for z in range(len(volume))])


def clock(work: Callable[[Tensor], object], volumes: list[Tensor], repeats: int) -> float:
    """Milliseconds per slice: the median of `repeats` passes over all volumes, after a warm-up pass."""
    device = volumes[0].device
    times = []
    for _ in range(1 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for volume in volumes:
            work(volume)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:])) / sum(map(len, volumes)) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--native", type=int, nargs=2, default=(256, 216), help="height and width of the images")
    parser.add_argument("--volumes", type=int, default=20)
    parser.add_argument(
        "--slices", type=int, nargs="*", default=(8, 9, 10, 12, 16), help="slices of the volumes, in turn"
    )
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(device_kind(args.device))
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    native = (args.native[0], args.native[1])
    batch = args.batch or BATCH[device.type]
    net = trained_like(build_segmenter(args.net, 1, CLASSES.count))
    about = About("benchmark", "", CLASSES, ("MRI",), (args.size, args.size), "slice")
    counts = [args.slices[i % len(args.slices)] for i in range(args.volumes)]
    volumes = [torch.rand(count, 1, args.size, args.size, device=device) for count in counts]
    rows, columns = (torch.tensor(linear_matrix(args.size, side), device=device) for side in native)

    def predictor(bf16: bool, graph: bool) -> TorchPredictor:
        return TorchPredictor(about, copy.deepcopy(net), device, bf16=bf16, batch=batch, graph=graph)

    def whole(model: TorchPredictor, flips: bool = False) -> Callable[[Tensor], object]:
        tta = "flip" if flips else "none"
        return lambda volume: [model.compute(part, native, tta) for part in torch.split(volume, batch)]

    reference = copy.deepcopy(net).to(device)
    result: dict[str, float] = {}
    result["plain_fp32_ms"] = clock(lambda v: plain(reference, v, rows, columns.T), volumes, max(1, args.repeats // 2))
    result["fp32_ms"] = clock(whole(predictor(False, False)), volumes, args.repeats)
    if cuda:
        result["bf16_eager_ms"] = clock(whole(predictor(True, False)), volumes, args.repeats)
    best = predictor(bf16=cuda, graph=True)
    if cuda:
        result["bf16_graph_ms"] = clock(whole(best), volumes, args.repeats)
    result["flip_ms"] = clock(whole(best, flips=True), volumes, args.repeats)
    images = [np.random.default_rng(0).integers(0, 900, (count, *native)).astype(np.int16) for count in counts]
    started = time.perf_counter()
    for image in images:
        best.predict(image)
    result["array_to_array_ms"] = (time.perf_counter() - started) / sum(counts) * 1000
    fastest = result["bf16_graph_ms"] if cuda else result["fp32_ms"]
    result["times_plain"] = result["plain_fp32_ms"] / fastest
    same = [best.compute(v, native).eq(plain(reference, v, rows, columns.T)).float().mean() for v in volumes]
    result["same_labels"] = float(torch.stack(same).mean())
    if cuda:
        result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for key, value in result.items():
        print(f"{key:20s} {value:10.4f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = vars(args) | {"out": None, "batch": batch}
        content = {**result, "settings": settings, "environment": environment(str(device))}
        args.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

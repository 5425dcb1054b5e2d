"""Every fused operation at the shapes of the training step: its error and its speed against plain torch.

Errors are relative (norm of the difference over the norm), of the result and of every gradient, against the plain
operations in float32; beside them the errors of plain bf16. Times are microseconds for forward and backward together,
as a replayed CUDA graph; GB/s counts each input, output and gradient once.

    python benchmarks/fused.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pclmix.kernels import plain
from pclmix.kernels.ops import norm_act, squared_norms, upsample_concat
from pclmix.nets.swin import LayerNorm, Linear, WindowAttention
from pclmix.training.step import cast_weights

LARGEST_ERROR = 0.03  # of a fused result; plain bf16 has a few thousandths for one operation


@dataclass
class Case:
    name: str
    work: Callable[..., Tensor]  # of the maps
    maps: list[Tensor]  # bf16
    parameters: list[Tensor]  # float32


def image(*shape: int) -> Tensor:
    x = torch.randn(*shape, device="cuda").to(torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16).requires_grad_()


def cases(n: int) -> Iterator[Case]:
    """`n` is the number of images: 3B."""
    for c, side, skip in [(2048, 8, 1024), (256, 16, 512), (128, 32, 256), (64, 64, 64), (32, 128, None)]:
        maps = [image(n, c, side, side)] + ([] if skip is None else [image(n, skip, 2 * side, 2 * side)])
        yield Case(f"upsample {c}+{skip} at {side}", lambda x, s=None: upsample_concat(x, s), maps, [])
    for c, side, add in [(16, 256, False), (64, 128, False), (256, 64, True), (512, 32, True), (2048, 8, True)]:
        norm = nn.BatchNorm2d(c).cuda()
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
        maps = [image(n, c, side, side) for _ in range(1 + add)]
        yield Case(
            f"batchnorm {c} at {side}{' + residual' if add else ''}",
            lambda x, r=None, norm=norm: norm_act(norm, x, r),
            maps,
            [norm.weight, norm.bias],
        )
    for c, heads, side in [(96, 3, 64), (192, 6, 32), (384, 12, 16), (768, 24, 8)]:
        layer = WindowAttention(c, heads, 8, shifted=True).cuda()
        yield Case(f"attention {c} at {side}", layer, [tokens(n, side, side, c)], list(layer.parameters()))
        norm = LayerNorm(c).cuda()
        yield Case(f"layer norm {c} at {side}", norm, [tokens(n, side, side, c)], list(norm.parameters()))
        linear = Linear(c, 4 * c).cuda()
        yield Case(f"linear {c} to {4 * c} at {side}", linear, [tokens(n, side, side, c)], list(linear.parameters()))
    matrices = (torch.randn(16, 96, 96, device="cuda") / 10).requires_grad_()
    yield Case("squared norms 96 at 64", lambda x: squared_norms(x, matrices), [tokens(n, 64, 64, 96)], [matrices])


def bf16(case: Case, gradient: Tensor, fused: bool) -> list[Tensor]:
    """The result and the gradients of maps and parameters, computed as a training step in bf16 does."""
    module = case.work if isinstance(case.work, nn.Module) else None
    with (
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False),
        cast_weights(module, torch.bfloat16) if module is not None else nullcontext(),
        nullcontext() if fused else plain(),
    ):
        out = case.work(*case.maps)
    gradients = torch.autograd.grad(out, [*case.maps, *case.parameters], gradient.to(out.dtype))
    return [out.detach(), *gradients]  # what autograd keeps belongs to a stream and must be freed here


def float32(case: Case) -> tuple[Tensor, list[Tensor]]:
    """A drawn gradient of the result, and the same list by plain operations in float32."""
    maps = [x.detach().float().requires_grad_() for x in case.maps]
    with plain():
        out = case.work(*maps)
    gradient = torch.randn_like(out).to(torch.bfloat16)
    return gradient, [out.detach(), *torch.autograd.grad(out, [*maps, *case.parameters], gradient.to(out.dtype))]


def error(given: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(given, wanted, strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def microseconds(case: Case, gradient: Tensor, fused: bool) -> float:
    """Warm-up and capture in one stream, with leaves created there: autograd waits for the streams of its tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        own = replace(case, maps=[x.detach().clone().requires_grad_() for x in case.maps])
        for _ in range(3):
            bf16(own, gradient, fused)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            bf16(own, gradient, fused)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / 20 * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=36)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    bad = []
    print(f"{'':36s} {'error':>8s} {'plain':>8s} {'us':>8s} {'plain':>8s} {'times':>6s} {'GB/s':>6s}")
    for case in cases(args.images):
        gradient, wanted = float32(case)
        given = bf16(case, gradient, fused=True)
        errors = error(given, wanted), error(bf16(case, gradient, fused=False), wanted)
        print(f"{case.name:36s} {errors[0]:8.1e} {errors[1]:8.1e}", end="", flush=True)
        if not errors[0] <= max(LARGEST_ERROR, 2 * errors[1]):
            bad.append(case.name)
        times = [microseconds(case, gradient, fused) for fused in (True, False)]
        gigabytes = 2 * sum(t.numel() * t.element_size() for t in [given[0], *case.maps]) / 1e9
        print(
            f" {times[0]:8.1f} {times[1]:8.1f} {times[1] / times[0]:6.2f} {gigabytes / times[0] * 1e6:6.0f}",
            flush=True,
        )
    if bad:
        raise SystemExit(f"wrong: {', '.join(bad)}")


if __name__ == "__main__":
    main()

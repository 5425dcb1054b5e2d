"""Short trials before training: compare fused kernels with plain torch, measure the speed of a device.

The comparison runs one batch forward and backward both ways, after its kernels were compiled ahead; without compiling
this takes about two seconds. Weights, statistics, queues and random states are restored.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Literal

import torch
from torch import Tensor

from pclmix import kernels
from pclmix.config import Config
from pclmix.data.batch import Batch
from pclmix.kernels import compile_ahead
from pclmix.labels import IGNORE
from pclmix.methods.base import build_method
from pclmix.training.parallel import gather_objects
from pclmix.training.step import Gradients, Loss

_FIRST = {"cpu": 1, "cuda": 3}  #: untimed warm-up steps
_STEPS, _SECONDS = 6, 4.0  #: timed steps at most
_FASTER = 1.15  #: minimum speed-up for bf16 on a CPU; CPUs without bf16 instructions are slower


def pixels_per_second(config: Config, channels: int, classes: int, device: torch.device) -> float:
    """Pixels of training images per second of forward and backward passes.

    Rounded to a power of the square root of 2, so that small changes of load give the same plan.
    """
    return _rounded(_rate(config, channels, classes, device))


def precision_and_rate(
    config: Config, channels: int, classes: int, device: torch.device
) -> tuple[Literal["32", "bf16"], float]:
    """The precision for this device, and its `pixels_per_second`. A CPU is timed with both precisions."""
    if device.type != "cpu":
        return config.engine.precision, pixels_per_second(config, channels, classes, device)
    what = channels, classes, device
    plain, half = (
        _rate(config.model_copy(update={"engine": config.engine.model_copy(update={"precision": p})}), *what)
        for p in ("32", "bf16")
    )
    return ("bf16", _rounded(half)) if half > _FASTER * plain else ("32", _rounded(plain))


def _rounded(rate: float) -> float:
    return float(2 ** (round(2 * math.log2(rate)) / 2))


def _rate(config: Config, channels: int, classes: int, device: torch.device) -> float:
    random = torch.random.get_rng_state()
    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(0)
    method = build_method(config, channels, classes, config.engine.batch)
    method.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    loss = Loss(method, config.engine.precision)
    shape = (config.engine.batch, *config.data.seen)
    image = torch.rand(shape[0], channels, *shape[1:], generator=generator, device=device)
    label = torch.randint(IGNORE, classes, shape, generator=generator, device=device)
    label[torch.rand(shape, generator=generator, device=device) < 0.9] = IGNORE  # few labelled pixels, as strokes
    batch = Batch(image, label, torch.arange(shape[0], device=device))
    progress = torch.full((), 0.5, device=device)
    if device.type == "cuda" and config.engine.precision == "bf16" and kernels.installed():
        with compile_ahead():  # in parallel, instead of at each kernel's first launch
            loss(batch, progress, generator)[0].backward()
    done, started = -_FIRST[device.type], time.perf_counter()
    while done < _STEPS and (done < 1 or time.perf_counter() - started < _SECONDS):
        if done == 0:
            _wait(device)
            started = time.perf_counter()
        loss(batch, progress, generator)[0].backward()
        done += 1
    _wait(device)
    rate = math.prod(shape) * done / (time.perf_counter() - started)
    torch.random.set_rng_state(random)
    return rate


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


#: bf16 rounds differently and ReLUs flip: single gradients differ by a few percent, their direction does not.
LARGEST_DIFFERENCE, SMALLEST_COSINE = 0.03, 0.97
log = logging.getLogger(__name__)


def use_plain_kernels_if_fused_disagree(gradients: Gradients, number: int, progress: float) -> str:
    """Switch the fused kernels off, with a warning, where they disagree on any rank; returns the complaint."""
    complaint: str = max(gather_objects(compare_kernels(gradients, number, progress)))
    if complaint:
        log.warning("fused kernels disagree with plain torch on this device (%s): training without them", complaint)
        kernels.switch_off()
    return complaint


def compare_kernels(gradients: Gradients, number: int, progress: float) -> str:
    """Empty if losses and gradient direction of batch `number` agree, else the difference."""
    gradients.feed.fill(number)
    gradients.progress.fill_(progress)
    if _has_kernels(gradients.feed.device):
        with compile_ahead():  # compiles in parallel, instead of at each kernel's first launch
            _run(gradients)
    names, values, gradient = _run(gradients)
    with kernels.plain():
        _, plain_values, plain_gradient = _run(gradients)
    for name, value, plain in zip(names, values.tolist(), plain_values.tolist(), strict=True):
        if not abs(value - plain) <= LARGEST_DIFFERENCE * max(abs(plain), 0.1):
            return f"{name} is {value:.5g}, plain {plain:.5g}"
    cosine = float(torch.dot(gradient, plain_gradient) / (gradient.norm() * plain_gradient.norm()).clamp(min=1e-12))
    if not cosine >= SMALLEST_COSINE:
        return f"the cosine between the gradients is {cosine:.4f}"
    return ""


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and kernels.installed()


def _run(gradients: Gradients) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Names and values of the losses, and the whole gradient as one vector; the state is restored."""
    device = gradients.feed.device
    state = {name: tensor.clone() for name, tensor in gradients.method.state_dict().items()}
    own, common = gradients.generator.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    values = gradients()
    gradient = torch.cat([p.grad.float().flatten() for p in gradients.parameters if p.grad is not None])
    for parameter in gradients.parameters:
        parameter.grad = None
    with torch.no_grad():
        for name, tensor in gradients.method.state_dict().items():
            tensor.copy_(state[name])
    gradients.generator.set_state(own)
    torch.set_rng_state(common)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    return tuple(values), torch.stack([v.float() for v in values.values()]), gradient

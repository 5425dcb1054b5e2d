"""How fast a device trains: a few steps of a configuration on random images, before there is any data."""

from __future__ import annotations

import math
import time
from typing import Literal

import torch

from pclmix import kernels
from pclmix.config import Config
from pclmix.data.batch import Batch
from pclmix.kernels.compile import compile_ahead
from pclmix.labels import IGNORE
from pclmix.methods.base import build_method
from pclmix.training.step import Loss

_FIRST = {"cpu": 1, "cuda": 3}  #: steps that are not counted: memory and algorithms are found in them
_STEPS, _SECONDS = 6, 4.0  #: counted, at most
_FASTER = 1.15  #: times as fast as 32 bits: what bf16 must be on a CPU; one without instructions for it is slower


def pixels_per_second(config: Config, channels: int, classes: int, device: torch.device) -> float:
    """Pixels of training images per second that forward and backward pass take, rounded to a power of the root of 2.

    Rounded, so that one machine finds the same plan again where its load differs a little.
    """
    return _rounded(_rate(config, channels, classes, device))


def precision_and_rate(
    config: Config, channels: int, classes: int, device: torch.device
) -> tuple[Literal["32", "bf16"], float]:
    """The precision that a plan for this device has, and `pixels_per_second` with it. A CPU is timed with both."""
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
    layout = torch.channels_last if config.engine.channels_last else torch.contiguous_format
    method.to(device, memory_format=layout).train()  # type: ignore[call-overload]
    loss = Loss(method, config.engine.precision)
    shape = (config.engine.batch, *config.data.seen)
    image = torch.rand(shape[0], channels, *shape[1:], generator=generator, device=device)
    label = torch.randint(IGNORE, classes, shape, generator=generator, device=device)
    label[torch.rand(shape, generator=generator, device=device) < 0.9] = IGNORE  # strokes are few
    batch = Batch(image, label, torch.arange(shape[0], device=device))
    progress = torch.full((), 0.5, device=device)
    if device.type == "cuda" and config.engine.precision == "bf16" and kernels.installed():
        with compile_ahead():  # side by side, rather than each kernel where it is first launched
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

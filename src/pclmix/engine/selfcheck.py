"""Before training: do the fused kernels, compiled on this machine for this GPU, agree with plain torch?

One batch goes forward and backward both ways, after a rehearsal in which kernels are compiled that were not before.
But for that it costs about two seconds. It leaves no trace: weights, statistics,
queues and random states are put back.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from pclmix.engine.step import TrainStep
from pclmix.nets import fused
from pclmix.rehearsal import rehearsal

#: bf16 rounds differently both ways and ReLUs flip: single gradients differ by a few percent, their direction does not.
LARGEST_DIFFERENCE, SMALLEST_COSINE = 0.03, 0.97
log = logging.getLogger(__name__)


def use_plain_kernels_if_fused_disagree(step: TrainStep, number: int, progress: float) -> str:
    """Switch the fused kernels off for this process, with a warning, where they disagree; returns the complaint."""
    complaint = compare_kernels(step, number, progress)
    if complaint:
        log.warning("fused kernels disagree with plain torch on this device (%s): training without them", complaint)
        fused.switch_off()
    return complaint


def compare_kernels(step: TrainStep, number: int, progress: float) -> str:
    """Empty when losses and the direction of the gradient of batch `number` agree both ways, else what differs."""
    step.feed.fill(number)
    step.progress.fill_(progress)
    if _has_kernels(step.feed.device):
        with rehearsal():  # compiles everything at once, rather than each kernel where it is first launched
            _run(step)
    names, values, gradient = _run(step)
    with fused.plain():
        _, plain_values, plain_gradient = _run(step)
    for name, value, plain in zip(names, values.tolist(), plain_values.tolist(), strict=True):
        if not abs(value - plain) <= LARGEST_DIFFERENCE * max(abs(plain), 0.1):
            return f"{name} is {value:.5g}, plain {plain:.5g}"
    cosine = float(torch.dot(gradient, plain_gradient) / (gradient.norm() * plain_gradient.norm()).clamp(min=1e-12))
    if not cosine >= SMALLEST_COSINE:
        return f"the cosine between the gradients is {cosine:.4f}"
    return ""


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and fused.installed()


def _run(step: TrainStep) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Names and values of the losses, and the whole gradient as one vector; everything that moved is put back."""
    device = step.feed.device
    state = {name: tensor.clone() for name, tensor in step.method.state_dict().items()}
    own, common = step.generator.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    names, values = step.backward()
    gradient = torch.cat([p.grad.float().flatten() for p in step.parameters if p.grad is not None])
    for parameter in step.parameters:
        parameter.grad = None
    with torch.no_grad():
        for name, tensor in step.method.state_dict().items():
            tensor.copy_(state[name])
    step.generator.set_state(own)
    torch.set_rng_state(common)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    return names, torch.stack([v.float() for v in values]), gradient

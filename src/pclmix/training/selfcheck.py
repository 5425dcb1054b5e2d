"""Before training: do the fused kernels, compiled on this machine for this GPU, agree with plain torch?

One batch goes forward and backward both ways, after all its kernels were compiled ahead; without compiling this takes
about two seconds. Weights, statistics, queues and random states are restored.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from pclmix import kernels
from pclmix.kernels.compile import compile_ahead
from pclmix.training.parallel import gather_objects
from pclmix.training.step import Gradients

#: bf16 rounds differently both ways and ReLUs flip: single gradients differ by a few percent, their direction does not.
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
    """Empty when losses and the direction of the gradient of batch `number` agree both ways, else what differs."""
    gradients.feed.fill(number)
    gradients.progress.fill_(progress)
    if _has_kernels(gradients.feed.device):
        with compile_ahead():  # compiles everything at once, rather than each kernel where it is first launched
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

"""Agreement with a teacher where the teacher is sure (uncertainty-aware mean teacher)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pclmix.losses.precision import full


def confident_mse(p: Tensor, target: Tensor, uncertainty: Tensor, threshold: Tensor) -> Tensor:
    """Squared error of probabilities, averaged over classes and over the pixels with uncertainty < threshold.

    p, target: (B, K, H, W), the target not differentiated. uncertainty: (B, H, W). threshold: 0-dim. Returns a
    scalar; 0, with a gradient of zeros, where no pixel is sure.
    """
    sure = uncertainty < threshold
    distance = (full(p) - full(target.detach())).square().mean(1)
    return distance.masked_fill(~sure, 0).sum() / sure.sum().clamp(min=1)


@torch.no_grad()
def follow(teacher: Sequence[Tensor], student: Sequence[Tensor], updates: Tensor, decay: float) -> None:
    """teacher = d teacher + (1 - d) student in place, d = min(decay, 1 - 1 / (n + 1)) after n earlier updates.

    updates: 0-dim n, counted up here. The first update copies the student, so that nothing of the start remains.
    """
    step = torch.maximum(1 / (updates + 1.0), torch.full_like(updates, 1 - decay, dtype=torch.float32))
    difference = torch._foreach_sub(list(student), list(teacher))
    torch._foreach_mul_(difference, step)
    torch._foreach_add_(list(teacher), difference)
    updates.add_(1)

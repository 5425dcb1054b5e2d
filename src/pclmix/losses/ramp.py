"""How a weight rises during training."""

from __future__ import annotations

import torch
from torch import Tensor


def ramp(progress: Tensor, length: float = 1.0) -> Tensor:
    """exp(-5 (1 - t)^2) with t = progress / length, 1 from t = 1 on. progress: 0-dim, t/T of the training."""
    t = (progress / length).clamp(max=1.0)
    return torch.exp(-5 * (1 - t).square())

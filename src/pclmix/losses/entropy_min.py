"""Entropy minimisation: every pixel should be sure of something."""

from __future__ import annotations

import math

from torch import Tensor

from pclmix.losses.uncertainty import entropy


def normalised_entropy(p: Tensor) -> Tensor:
    """mean over pixels of -sum_k p_k log p_k / log K: 0 where all are sure, 1 where none is. p: (B, K, H, W)."""
    return entropy(p).mean() / math.log(p.shape[1])

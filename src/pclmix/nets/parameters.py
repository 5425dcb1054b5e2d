"""Counting what a network learns."""

from __future__ import annotations

from torch import nn


def count_parameters(module: nn.Module) -> int:
    """Trainable values of `module`; a parameter used in two places counts once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)

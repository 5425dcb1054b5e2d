"""Several networks that answer as one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """Logits (B, K, H, W) whose softmax is the mean of the networks' softmax."""

    def __init__(self, nets: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, image: Tensor) -> Tensor:
        logs = torch.stack([net(image).float().log_softmax(1) for net in self.nets])
        return logs.logsumexp(0) - math.log(len(self.nets))  # a tensor made here could not be captured in a graph

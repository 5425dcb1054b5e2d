"""How well a network agrees with scribbles it was not trained on. No dense mask is opened for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pclmix.data.store import Store
from pclmix.labels import IGNORE
from pclmix.methods.base import Method


@torch.no_grad()
def agreement(net: nn.Module, store: Store, device: torch.device, classes: int, batch: int = 16) -> torch.Tensor:
    """Counts (cases, K, K): scribbled class by predicted class, in float64. The network's mode is restored."""
    training = net.training
    net.eval()
    counts = torch.zeros(len(store.cases), classes * classes, dtype=torch.float64)
    for first in range(0, len(store), batch):
        chosen = slice(first, first + batch)
        image = torch.from_numpy(np.array(store.images[chosen])).float().to(device)
        label = torch.from_numpy(np.array(store.labels[chosen, 0])).long()
        predicted = net(image).argmax(1).cpu()
        pair = torch.where(label != IGNORE, label * classes + predicted, classes * classes)
        for case, row in zip(store.case_of[chosen], pair, strict=True):
            counts[case] += torch.bincount(row.flatten(), minlength=classes * classes + 1)[:-1]
    net.train(training)
    return counts.view(-1, classes, classes)


def scribble_scores(method: Method, store: Store, device: torch.device) -> dict[str, float]:
    """`validation/recall`: the share of scribbled pixels predicted right, averaged over the classes scribbled."""
    counts = agreement(method.net, store, device, method.task.classes).sum(0)
    drawn = counts.sum(1)
    recall = counts.diagonal()[drawn > 0] / drawn[drawn > 0]
    return {"validation/recall": float(recall.mean())}

"""Class-wise contrast between two decoders: the features of a class lie together, those of two classes apart."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from pclmix.losses.contrast import info_nce

TEMPERATURE = 0.1


def sample_classes(label: Tensor, classes: int, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """`count` random pixels of each class. label: (B, h, w), IGNORE for no class.

    Returns indices (K, count) into the flattened map and valid (K, count) bool; what a class lacks is not valid.
    """
    flat = label.flatten()
    own = flat == torch.arange(classes, device=label.device)[:, None]
    lot = torch.rand(flat.shape, generator=generator, device=label.device)
    # One sort for all classes: the order is random, so the first of a class in it are a fair sample of it.
    place = torch.where(own, lot, 2.0)
    lowest, index = place.topk(min(count, flat.numel()), dim=1, largest=False)
    lacking = count - index.shape[1]
    index, lowest = (torch.nn.functional.pad(t, (0, lacking), value=v) for t, v in ((index, 0), (lowest, 2.0)))
    return index, lowest < 2


def class_contrast(f1: Tensor, f2: Tensor, index: Tensor, valid: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """InfoNCE of each decoder's features against the other's, the mean of both directions.

    f1, f2: (B, D, h, w). index, valid: (K, n) as sampled. Positives are the other decoder's features of the same
    class, negatives those of all other classes; what is compared with is not differentiated. 0 where nothing is valid.
    """
    classes, count = index.shape
    label = torch.arange(classes, device=index.device).repeat_interleave(count)
    one, two = (f.permute(0, 2, 3, 1).flatten(0, 2).index_select(0, index.flatten()) for f in (f1, f2))

    def against(anchors: Tensor, others: Tensor) -> Tensor:
        entries = others.detach().view(classes, count, -1)
        return info_nce(anchors, label, valid.flatten(), entries, valid, temperature)

    return (against(one, two) + against(two, one)) / 2

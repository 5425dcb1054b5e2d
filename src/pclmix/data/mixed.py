"""Cases annotated in different ways in one dataset: dense masks beside scribbles, classes nobody looked for.

It runs on the batch, on its device, in fixed shapes: labels are changed before any loss sees them, so that every
method respects it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from pclmix.data.store import Store
from pclmix.labels import IGNORE

#: A slice of a dense mask counts in a step as so many scribbled ones. Its pixels repeat each other: with all of them a
#: slice would weigh as much as fifty scribbled ones, and the loss would be that of the dense cases alone.
WORTH = 8.0


@dataclass(frozen=True)
class Mixed:
    """For each slice of a store what may be used of its labels."""

    keep: Tensor  #: (N,) share of the labelled pixels drawn in a step
    hides: Tensor  #: (N,) bool, of a dense mask whose background may hold a class that nobody looked for
    unlooked: Tensor  #: (N,) bool, of a case where nobody looked for some class

    def labels(self, label: Tensor, index: Tensor, generator: Generator) -> Tensor:
        """`label` (B, H, W) of the slices `index` (B,), with IGNORE where it may not be used in this step."""
        draw = torch.rand(label.shape, generator=generator, device=generator.device)
        left_out = draw >= self.keep[index][:, None, None]
        left_out |= self.hides[index][:, None, None] & (label == 0)
        return label.masked_fill(left_out, IGNORE)

    def guesses(self, marked: Tensor, index: Tensor) -> Tensor:
        """Labels that follow from a habit, (B, H, W): none in cases where another class may lie there."""
        return marked.masked_fill(self.unlooked[index][:, None, None], IGNORE)


def mixed_supervision(store: Store, device: torch.device) -> Mixed | None:
    """What a store asks for; None where all cases are annotated alike and completely."""
    if not len(store.dense) or not len(store.annotated):
        return None
    unlooked: npt.NDArray[np.bool_] = np.asarray(~store.annotated.all(axis=1))
    both = bool(store.dense.any() and not store.dense.all())
    if not both and not unlooked.any():
        return None
    counts = np.array([(label[0] >= 0).sum() for label in store.labels], float)
    dense = store.dense[store.case_of]
    keep = np.ones(len(counts))
    scribbled = counts[~dense & (counts > 0)]
    if both and len(scribbled):
        keep[dense] = np.minimum(1.0, WORTH * np.median(scribbled) / np.maximum(counts[dense], 1))
    hides = (unlooked & store.dense)[store.case_of]
    return Mixed(
        torch.from_numpy(keep.astype(np.float32)).to(device),
        torch.from_numpy(hides).to(device),
        torch.from_numpy(unlooked[store.case_of]).to(device),
    )

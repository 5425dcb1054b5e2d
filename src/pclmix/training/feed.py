"""Copies slices to the device, in an order that depends only on the seed and the step.

The order is an endless sequence of permutations; step t takes the next `batch` entries, rank r its part of them. A
resume needs no saved state. If fewer than half of the slices are labelled, each permutation repeats the labelled ones,
so that they fill about half of a batch. Otherwise most batches would have no labels when few slices are annotated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pclmix.data.preprocess import Crops
from pclmix.data.store import Store
from pclmix.labels import IGNORE

Places = npt.NDArray[np.int64]
_STEPS_AHEAD = 1024  # steps whose indices are sent to the device at once


class Feed:
    """Fills the step's input buffers: `image` (b, C, H, W), `label` (b, 1 + M, H, W), `index` (b,).

    With `patch` these are parts of the slices, cropped around a stroke.
    """

    def __init__(
        self,
        store: Store,
        batch: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        patch: tuple[int, int] | None = None,
    ) -> None:
        self.batch, self.seed, self.rank, self.world, self.device = batch, seed, rank, world, device
        own = batch // world
        self.turns, self.maps = _turns(store), store.maps
        side = patch or store.images.shape[2:]
        self.image = torch.zeros(own, store.images.shape[1], *side, device=device)
        self.label = torch.zeros(own, store.labels.shape[1], *side, dtype=torch.int64, device=device)
        self.index = torch.zeros(own, dtype=torch.int64, device=device)
        self._store = store
        self._crops = None if patch is None else Crops(store.labels[:, 0], patch, seed)
        self._resident = _resident(store, device) if patch is None else None
        self._table = torch.empty(0, dtype=torch.int64, device=device)
        self._table_from = -1

    def fill(self, step: int) -> None:
        """Put the slices of `step` (counted from 0) into the buffers."""
        if not 0 <= step - self._table_from < len(self._table) or self._table_from < 0:
            self._table_from = step
            places = [self.places(step + i) for i in range(_STEPS_AHEAD)]
            self._table = torch.from_numpy(np.stack(places)).to(self.device)
        self.index.copy_(self._table[step - self._table_from])
        if self._resident is not None:
            images, labels = self._resident
            self.image.copy_(images.index_select(0, self.index))
            self.label.copy_(labels.index_select(0, self.index))
        else:
            chosen = self.places(step)
            if self._crops is not None:
                self._fill_crops(step, chosen, self._crops)
                return
            self.image.copy_(torch.from_numpy(self._store.images[chosen]), non_blocking=True)
            self.label.copy_(torch.from_numpy(self._store.labels[chosen]), non_blocking=True)

    def _fill_crops(self, step: int, chosen: Places, crops: Crops) -> None:
        own, (h, w) = self.batch // self.world, crops.patch
        for row, index in enumerate(chosen.tolist()):
            top, left = crops.corner(index, step * self.batch + self.rank * own + row)
            part = (index, slice(None), slice(top, top + h), slice(left, left + w))
            self.image[row].copy_(torch.from_numpy(self._store.images[part].copy()), non_blocking=True)
            self.label[row].copy_(torch.from_numpy(self._store.labels[part].copy()), non_blocking=True)

    def places(self, step: int) -> Places:
        """The store indices of this rank at `step`."""
        own = self.batch // self.world
        first = step * self.batch + self.rank * own
        positions = np.arange(first, first + own)
        count = len(self.turns)
        epochs = positions // count
        permutations = {e: np.random.default_rng([self.seed, int(e)]).permutation(count) for e in np.unique(epochs)}
        chosen = [permutations[e][p % count] for e, p in zip(epochs, positions, strict=True)]
        places: Places = self.turns[chosen]
        return places


def _turns(store: Store) -> Places:
    """The slices of one permutation: each once, labelled ones repeatedly if they are the minority."""
    everything, labelled = np.arange(len(store)), np.flatnonzero(_labelled(store))
    others = len(store) - len(labelled)
    return np.concatenate([everything, *[labelled] * (round(others / max(1, len(labelled))) - 1)])


def _labelled(store: Store) -> npt.NDArray[np.bool_]:
    """Which slices have any label; read slice by slice, since the store may exceed memory."""
    return np.fromiter((label[0].max() > IGNORE for label in store.labels), bool, len(store))


def _resident(store: Store, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The whole store on the device if it fits in half of the free memory, else None."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = _free_memory()
    if store.nbytes > free // 2:
        return None
    return torch.from_numpy(np.array(store.images)).to(device), torch.from_numpy(np.array(store.labels)).to(device)


def _free_memory() -> int:
    """Available memory in bytes; 4 GiB if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 2**30

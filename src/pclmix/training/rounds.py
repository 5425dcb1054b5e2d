"""Further rounds: labels for the training slices from the network of the round before, straightened by their strokes.

The labels lie in the run folder as roundN.npz. A checkpoint of round N has their digest, so that a resumed round goes
on with the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pclmix.config import Config
from pclmix.data.habits import Array, Habits
from pclmix.data.preprocess import FLIPS
from pclmix.data.store import Store
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path
from pclmix.labels import Labels
from pclmix.nets.segmenter import fold_batchnorm
from pclmix.training.checkpoint import Round

LABELS = "round{}.npz"
Labelling = npt.NDArray[np.uint8]  #: (N, H, W), a class for each pixel of each training slice
_BATCH = {"cuda": 64, "cpu": 4}
_LOOKED_AT = 256  #: slices, evenly spread, that show which wall is round which class


def end_of(config: Config, of: Round) -> float:
    """The second at which a round ends in a run with a budget of engine.seconds.

    Making its labels is part of a round. Where that took most of its time, the budget is overrun rather than the
    network left untrained.
    """
    budget, each = config.engine.seconds or 0.0, config.rounds.share
    end = budget * (1 - each * (config.rounds.count - of.number))
    return end if of.number == 1 else max(end, of.since + 0.5 * each * budget)


def make_labels(
    net: nn.Module, store: Store, habits: Habits, labels: Labels, device: torch.device, bf16: bool
) -> Labelling:
    """What `net` predicts for every slice, averaged over flips and straightened; its BatchNorm is folded in place."""
    from pclmix.data.straighten import rules_of, straighten_all  # SciPy, which the start of a run has no need of

    strokes = store.labels[:, 0]
    seen = np.unique(np.linspace(0, len(store) - 1, _LOOKED_AT).round().astype(int))
    annotated: list[list[int] | None] = [np.flatnonzero(row).tolist() for row in store.annotated]
    annotated = annotated or [None] * len(store.cases)
    jobs = (
        (store.images[i], strokes[i], predicted, annotated[store.case_of[i]])
        for i, predicted in enumerate(_predictions(net, store, device, torch.bfloat16 if bf16 else torch.float32))
    )
    return straighten_all(jobs, rules_of(habits, labels, strokes[seen]))


@torch.inference_mode()
def _predictions(net: nn.Module, store: Store, device: torch.device, dtype: torch.dtype) -> Iterator[Array]:
    """Labels (H, W) uint8 of every slice; the slices of one batch are straightened while the device has the next."""
    net = fold_batchnorm(net).to(device, dtype, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    size = _BATCH[device.type]
    for first in range(0, len(store), size):
        image = torch.from_numpy(np.array(store.images[first : first + size])).to(device).to(dtype)
        views = [net(image.flip(axes)).float().softmax(1).flip(axes) for axes in FLIPS]
        yield from torch.stack(views).mean(0).argmax(1).to(torch.uint8).cpu().numpy()


def with_labels(store: Store, labels: Labelling) -> Store:
    """The store with these labels in place of the strokes and of a method's own maps."""
    return replace(store, labels=labels[:, None].astype(np.int16), maps=())


def digest(labels: Labelling) -> str:
    return hashlib.blake2b(np.ascontiguousarray(labels).data, digest_size=16).hexdigest()


def write_labels(run: Path, number: int, labels: Labelling) -> None:
    """Write RUN/roundN.npz."""
    with atomic_path(run / LABELS.format(number)) as temporary:
        np.savez_compressed(temporary, labels=labels)


def read_labels(run: Path, of: Round, store: Store) -> Labelling:
    """RUN/roundN.npz, refused where it does not hold what the round has been trained on."""
    path = run / LABELS.format(of.number)
    try:
        with np.load(path, allow_pickle=False) as content:
            labels: Labelling = content["labels"]
    except Exception as error:  # a damaged archive raises errors of many types
        raise PclmixError(
            f"{path} cannot be read ({error}); it holds the labels of round {of.number}: {_WAY_OUT}"
        ) from error
    if labels.shape != (len(store), *store.images.shape[2:]) or digest(labels) != of.labels:
        raise PclmixError(f"{path} does not hold the labels that round {of.number} was trained on: {_WAY_OUT}")
    return labels


_WAY_OUT = "put the file back, or start again in another folder"

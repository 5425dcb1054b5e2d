"""Further rounds: labels predicted by the network of the previous round, corrected by strokes and stroke habits.

The labels are kept in the run folder as roundN.npz; the checkpoints of round N hold their digest, so that a resumed
round continues with the same ones. The corrections are in `straighten.py`.
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

from pclmix.config import Config, Rounds
from pclmix.data.batch import has_ring
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
_WAY_OUT = "put the file back, or start again in another folder"
_BATCH = {"cuda": 64, "cpu": 4}
_LOOKED_AT = 256  #: slices, evenly spread, used to find which wall encloses which class


def end_of(config: Config, of: Round) -> float:
    """The second at which a round ends in a run with a budget of engine.seconds.

    A round includes making its labels. If that took most of the time, the budget is exceeded, so that the network is
    still trained.
    """
    budget, each = config.engine.seconds or 0.0, config.rounds.share
    end = budget * (1 - each * (config.rounds.count - of.number))
    return end if of.number == 1 else max(end, of.since + 0.5 * each * budget)


def make_labels(
    net: nn.Module,
    store: Store,
    habits: Habits,
    labels: Labels,
    device: torch.device,
    bf16: bool,
    settings: Rounds,
) -> Labelling:
    """Corrected predictions of `net` for every slice, averaged over flips; folds its BatchNorm in place."""
    from pclmix.training.straighten import Predicted, rules_of, straighten_all  # imports SciPy

    strokes = store.labels[:, 0]
    seen = np.unique(np.linspace(0, len(store) - 1, _LOOKED_AT).round().astype(int))
    annotated: list[list[int] | None] = [None if row.all() else np.flatnonzero(row).tolist() for row in store.annotated]
    annotated = annotated or [None] * len(store.cases)
    rules = rules_of(habits, labels, strokes[seen])
    slices = (
        Predicted(store.images[i], strokes[i], predicted, known, known is None and _has_ring(strokes[i], rules.ring))
        for i, predicted in enumerate(_predictions(net, store, device, torch.bfloat16 if bf16 else torch.float32))
        for known in (annotated[store.case_of[i]],)
    )
    return straighten_all(slices, rules, settings.brightness, settings.midline)


def _has_ring(strokes: Array, k: int | None) -> bool:
    """Whether the outside of the strokes (H, W) is class `k`, as in training steps."""
    return k is not None and bool(has_ring(torch.from_numpy(np.array(strokes))[None], k))


@torch.inference_mode()
def _predictions(net: nn.Module, store: Store, device: torch.device, dtype: torch.dtype) -> Iterator[Array]:
    """Probabilities (K, H, W) uint8 of every slice; the CPU corrects while the device predicts the next batch."""
    net = fold_batchnorm(net).to(device, dtype, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    size = _BATCH[device.type]
    for first in range(0, len(store), size):
        image = torch.from_numpy(np.array(store.images[first : first + size])).to(device).to(dtype)
        views = [net(image.flip(axes)).float().softmax(1).flip(axes) for axes in FLIPS]
        yield from (255 * torch.stack(views).mean(0)).round().to(torch.uint8).cpu().numpy()


def with_labels(store: Store, labels: Labelling) -> Store:
    """The store with these labels instead of the strokes and the method's maps."""
    return replace(store, labels=labels[:, None].astype(np.int16), maps=())


def digest(labels: Labelling) -> str:
    return hashlib.blake2b(np.ascontiguousarray(labels).data, digest_size=16).hexdigest()


def write_labels(run: Path, number: int, labels: Labelling) -> None:
    """Write RUN/roundN.npz."""
    with atomic_path(run / LABELS.format(number)) as temporary:
        np.savez_compressed(temporary, labels=labels)


def read_labels(run: Path, of: Round, store: Store) -> Labelling:
    """Read RUN/roundN.npz; refused if its digest differs from that of the checkpoint."""
    path = run / LABELS.format(of.number)
    try:
        with np.load(path, allow_pickle=False) as content:
            labels: Labelling = content["labels"]
    except Exception as error:  # damaged archives raise many types of errors
        raise PclmixError(
            f"{path} cannot be read ({error}); it holds the labels of round {of.number}: {_WAY_OUT}"
        ) from error
    if labels.shape != (len(store), *store.images.shape[2:]) or digest(labels) != of.labels:
        raise PclmixError(f"{path} does not hold the labels that round {of.number} was trained on: {_WAY_OUT}")
    return labels

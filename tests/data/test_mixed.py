"""Mixed annotations: dense masks beside scribbles, unannotated classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pclmix.data.batch import WORTH, mixed_supervision
from pclmix.data.store import Store
from pclmix.labels import IGNORE

CPU = torch.device("cpu")


def made(labels: list[np.ndarray], dense: list[bool], annotated: list[list[bool]]) -> Store:
    """One slice per case."""
    count = len(labels)
    return Store(
        np.zeros((count, 1, *labels[0].shape), np.float16),
        np.stack(labels)[:, None].astype(np.int16),
        (),
        tuple(f"case{n}" for n in range(count)),
        np.arange(count),
        ((1.0, 1.0, 1.0),) * count,
        dense=np.array(dense),
        annotated=np.array(annotated),
    )


def stroke() -> np.ndarray:
    label = np.full((40, 40), IGNORE)
    label[3, :10], label[9, :10] = 0, 1
    return label


def mask() -> np.ndarray:
    label = np.zeros((40, 40), int)
    label[10:30, 10:30] = 1
    return label


ALL, NOT_2 = [True, True, True], [True, True, False]


@pytest.mark.parametrize("kind", [stroke, mask])
def test_uniform_annotation_is_unchanged(kind: type) -> None:
    dense = kind is mask
    assert mixed_supervision(made([kind(), kind()], [dense] * 2, [ALL] * 2), CPU) is None


def test_a_dense_slice_counts_as_a_few_scribbled_ones() -> None:
    store = made([stroke(), mask(), stroke()], [False, True, False], [ALL] * 3)
    mixed = mixed_supervision(store, CPU)
    assert mixed is not None
    label = torch.from_numpy(store.labels[:, 0].astype(np.int64))
    generator = torch.Generator().manual_seed(0)
    drawn = [mixed.labels(label, torch.arange(3), generator) for _ in range(50)]
    for one in drawn:
        assert torch.equal(one[0], label[0])
        assert torch.equal(one[2], label[2])
        assert ((one[1] == label[1]) | (one[1] == IGNORE)).all()
    counts = np.mean([(one[1] >= 0).sum().item() for one in drawn])
    assert counts == pytest.approx(WORTH * 20, rel=0.1)


def test_rows_follow_the_index() -> None:
    store = made([stroke(), mask()], [False, True], [ALL] * 2)
    mixed = mixed_supervision(store, CPU)
    assert mixed is not None
    label = torch.from_numpy(store.labels[[1, 0], 0].astype(np.int64))
    kept = mixed.labels(label, torch.tensor([1, 0]), torch.Generator().manual_seed(0))
    assert torch.equal(kept[1], label[1])
    assert (kept[0] >= 0).sum() < (label[0] >= 0).sum()


def test_mask_ignores_unannotated_classes() -> None:
    """Its background may be that class; a background stroke is certain."""
    store = made([stroke(), mask()], [False, True], [NOT_2, NOT_2])
    mixed = mixed_supervision(store, CPU)
    assert mixed is not None
    label = torch.from_numpy(store.labels[:, 0].astype(np.int64))
    used = mixed.labels(label, torch.arange(2), torch.Generator().manual_seed(0))
    assert torch.equal(used[0], label[0])
    assert not (used[1] == 0).any()
    assert (used[1] == 1).any()
    guessed = torch.zeros_like(label)
    assert (mixed.guesses(guessed, torch.arange(2)) == IGNORE).all()


def test_habits_need_all_classes_annotated() -> None:
    mixed = mixed_supervision(made([stroke(), stroke()], [False] * 2, [ALL, NOT_2]), CPU)
    assert mixed is not None
    guessed = mixed.guesses(torch.zeros(2, 40, 40, dtype=torch.int64), torch.arange(2))
    assert (guessed[0] == 0).all()
    assert (guessed[1] == IGNORE).all()

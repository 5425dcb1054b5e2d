from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.labels import IGNORE
from pclmix.losses.class_contrast import class_contrast, sample_classes


def slow_contrast(f1: Tensor, f2: Tensor, index: Tensor, valid: Tensor, tau: float) -> float:
    def one_way(a: Tensor, b: Tensor) -> float:
        rows_a, rows_b = (F.normalize(f.permute(0, 2, 3, 1).flatten(0, 2), dim=1) for f in (a, b))
        losses = []
        for k, i in valid.nonzero().tolist():
            anchor = rows_a[index[k, i]]
            similar = {(c, j): float(anchor @ rows_b[index[c, j]]) / tau for c, j in valid.nonzero().tolist()}
            negatives = sum(math.exp(s) for (c, _), s in similar.items() if c != k)
            positives = [s for (c, _), s in similar.items() if c == k]
            losses.append(sum(-math.log(math.exp(s) / (math.exp(s) + negatives)) for s in positives) / len(positives))
        return sum(losses) / len(losses) if losses else 0.0

    return (one_way(f1, f2) + one_way(f2, f1)) / 2


def test_samples_are_of_their_class_distinct_and_as_many_as_there_are() -> None:
    g = torch.Generator().manual_seed(0)
    label = torch.full((2, 6, 6), IGNORE)
    label[0, :2], label[1, 0, :3] = 0, 2
    index, valid = sample_classes(label, 3, 8, g)
    assert index.shape == valid.shape == (3, 8)
    assert valid.sum(1).tolist() == [8, 0, 3]
    for k in (0, 2):
        chosen = index[k][valid[k]]
        assert (label.flatten()[chosen] == k).all()
        assert len(chosen.unique()) == len(chosen)
    again, _ = sample_classes(label, 3, 8, g)
    assert not torch.equal(index[0], again[0])


def test_a_map_smaller_than_the_sample_is_padded() -> None:
    index, valid = sample_classes(torch.zeros(1, 2, 2, dtype=torch.int64), 2, 6, torch.Generator().manual_seed(0))
    assert index.shape == (2, 6)
    assert valid.sum(1).tolist() == [4, 0]


def test_class_contrast_equals_the_loop() -> None:
    g = torch.Generator().manual_seed(1)
    f1, f2 = (torch.randn(2, 5, 4, 4, generator=g) for _ in range(2))
    label = torch.randint(-1, 3, (2, 4, 4), generator=g)
    index, valid = sample_classes(label, 4, 5, g)
    assert float(class_contrast(f1, f2, index, valid, 0.5)) == pytest.approx(
        slow_contrast(f1, f2, index, valid, 0.5), rel=1e-4
    )


def test_class_contrast_is_small_where_classes_are_apart_and_zero_where_nothing_is_known() -> None:
    label = torch.tensor([[[0, 0, 1, 1]]])
    apart = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]).view(1, 2, 1, 4)
    index, valid = sample_classes(label, 2, 2, torch.Generator().manual_seed(0))
    # One positive like the anchor, two negatives at a right angle: -log(e^10 / (e^10 + 2)).
    expected = math.log(1 + 2 * math.exp(-10))
    assert float(class_contrast(apart, apart, index, valid)) == pytest.approx(expected, rel=1e-2)
    assert float(class_contrast(apart, apart, index, torch.zeros_like(valid))) == 0

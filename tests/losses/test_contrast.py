"""Pixel contrast (equation 8) and class-wise contrast: by hand and against loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pclmix.labels import IGNORE
from pclmix.losses.contrast import at_stride, class_contrast, info_nce, prototypes, sample_anchors, sample_classes


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_info_nce(anchors: Tensor, label: Tensor, valid: Tensor, entries: Tensor, filled: Tensor, tau: float) -> float:
    """Equation 8 word by word."""

    def e(v: Tensor, w: Tensor) -> float:
        return math.exp(float(v @ w) / (float(v.norm()) * float(w.norm())) / tau)

    losses = []
    for v, c in [(anchors[i], int(label[i])) for i in range(len(anchors)) if valid[i]]:
        classes, length = filled.shape
        pos = [entries[c, j] for j in range(length) if filled[c, j]]
        neg = [entries[k, j] for k in range(classes) for j in range(length) if k != c and filled[k, j]]
        if pos:
            against = sum(e(v, n) for n in neg)
            losses.append(sum(-math.log(e(v, p) / (e(v, p) + against)) for p in pos) / len(pos))
    return sum(losses) / len(losses) if losses else 0.0


def test_info_nce_by_hand() -> None:
    anchors = torch.tensor([[2.0, 0.0]])
    entries = torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[-1.0, 0.0], [9.0, 9.0]]])
    filled = torch.tensor([[True, True], [True, False]])
    label, valid = torch.tensor([0]), torch.tensor([True])
    # Cosines: 1 and 0 with the two positives, -1 with the one filled negative; tau 0.5.
    near = -math.log(math.exp(2) / (math.exp(2) + math.exp(-2)))
    far = -math.log(1 / (1 + math.exp(-2)))
    loss = info_nce(anchors, label, valid, entries, filled, temperature=0.5)
    assert float(loss) == pytest.approx((near + far) / 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 5), st.floats(0, 1), st.integers(0, 99))
def test_info_nce_equals_the_loop(n: int, k: int, q: int, share: float, seed: int) -> None:
    g = generator(seed)
    anchors, entries = torch.randn(n, 3, generator=g), torch.randn(k, q, 3, generator=g)
    label, valid = torch.randint(0, k, (n,), generator=g), torch.rand(n, generator=g) < 0.7
    filled = torch.rand(k, q, generator=g) < share
    result = info_nce(anchors, label, valid, entries, filled, temperature=0.2)
    assert float(result) == pytest.approx(slow_info_nce(anchors, label, valid, entries, filled, 0.2), abs=1e-4)


@pytest.mark.parametrize("case", ["no anchors", "queue empty", "own class empty", "no negatives"])
def test_info_nce_edges_are_zero_with_a_gradient(case: str) -> None:
    anchors, entries = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, 3)
    label, valid, filled = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool), torch.ones(3, 5) > 0
    if case == "no anchors":
        valid = torch.zeros_like(valid)
    elif case == "queue empty":
        filled = torch.zeros_like(filled)
    elif case == "own class empty":
        filled[0] = False
    else:
        filled[1:] = False
    loss = info_nce(anchors, label, valid, entries, filled)
    loss.backward()
    assert float(loss.detach()) == 0
    assert anchors.grad is not None
    assert not anchors.grad.any()


def test_info_nce_gradient_reaches_anchors_only() -> None:
    anchors = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    entries = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    label, valid = torch.tensor([0, 1, 1]), torch.tensor([True, True, False])
    filled = torch.tensor([[True, True, False], [True, False, False]])
    assert torch.autograd.gradcheck(lambda v: info_nce(v, label, valid, entries, filled), anchors)
    info_nce(anchors, label, valid, entries, filled).backward()
    assert entries.grad is None, "the queue must be detached"
    assert anchors.grad is not None
    assert not anchors.grad[2].any()


def test_info_nce_is_computed_in_float32() -> None:
    anchors, entries = torch.randn(8, 16).bfloat16(), torch.randn(2, 4, 16)
    label, valid, filled = torch.arange(8) % 2, torch.ones(8) > 0, torch.ones(2, 4) > 0
    with torch.autocast("cpu", torch.bfloat16):
        loss = info_nce(anchors, label, valid, entries, filled)
    torch.testing.assert_close(loss, info_nce(anchors.float(), label, valid, entries, filled), rtol=0, atol=0)


def test_info_nce_is_finite_near_temperature_zero() -> None:
    anchors = torch.tensor([[1.0, 0.0]], requires_grad=True)
    entries = torch.tensor([[[-1.0, 0.0]], [[1.0, 0.0]]])
    loss = info_nce(anchors, torch.tensor([0]), torch.tensor([True]), entries, torch.ones(2, 1) > 0, 1e-4)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(20000)
    assert anchors.grad is not None
    assert anchors.grad.isfinite().all()


def test_at_stride_takes_the_corner_pixel() -> None:
    pixels = torch.arange(16 * 24).view(1, 16, 24)
    assert at_stride(pixels).tolist() == [[[0, 8, 16], [192, 200, 208]]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 8), st.integers(2, 5), st.integers(1, 60), st.integers(0, 99))
def test_anchors_are_valid_distinct_and_balanced(b: int, side: int, k: int, count: int, seed: int) -> None:
    g = generator(seed)
    pseudo = torch.randint(-1, k, (b, side, side), generator=g)
    predicted = torch.randint(0, k, (b, side, side), generator=g)
    anchors = sample_anchors(pseudo, predicted, count, g)
    assert anchors.index.shape == anchors.label.shape == anchors.valid.shape == (count,)
    index, label = anchors.index[anchors.valid], anchors.label[anchors.valid]
    flat = pseudo.flatten()
    available = torch.bincount(flat[flat >= 0], minlength=k)
    assert len(index) == min(count, int(available.sum()))
    assert len(index.unique()) == len(index)
    assert torch.equal(flat[index], label)
    taken = torch.bincount(label, minlength=k)
    # No class may have two more than another that still had candidates.
    open_classes = taken < available
    if open_classes.any():
        assert int(taken.max()) <= int(taken[open_classes].min()) + 1
    for c in range(k):
        mine = flat == c
        hard = predicted.flatten() != flat
        n, n_hard = int(taken[c]), int(hard[index][label == c].sum())
        all_hard, all_easy = int((mine & hard).sum()), int((mine & ~hard).sum())
        wanted = max(n - all_easy, min(all_hard, (n + 1) // 2))
        assert n_hard == wanted


def test_half_of_the_anchors_are_hard() -> None:
    pseudo = torch.zeros(1, 10, 10, dtype=torch.int64)
    predicted = (torch.arange(100).view(1, 10, 10) < 30).long()
    anchors = sample_anchors(pseudo, predicted, 20, generator())
    assert int((anchors.index < 30).sum()) == 10
    few = sample_anchors(pseudo, (torch.arange(100).view(1, 10, 10) < 3).long(), 20, generator())
    assert int((few.index < 3).sum()) == 3


def test_anchors_are_reproducible_by_seed() -> None:
    pseudo, predicted = torch.zeros(2, 8, 8, dtype=torch.int64), torch.zeros(2, 8, 8, dtype=torch.int64)
    first, again, other = (sample_anchors(pseudo, predicted, 16, generator(s)).index for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    g, hits = generator(), torch.zeros(128)
    for _ in range(400):
        hits[sample_anchors(pseudo, predicted, 16, g).index] += 1
    # 50 expected each; five standard deviations of a binomial are 33.
    assert hits.min() > 17
    assert hits.max() < 83


def test_anchors_without_candidates_are_not_valid() -> None:
    pseudo = torch.full((2, 4, 4), IGNORE)
    anchors = sample_anchors(pseudo, torch.zeros_like(pseudo), 8, generator())
    assert not anchors.valid.any()
    embedding = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss = info_nce(anchors.pick(embedding), anchors.label, anchors.valid, torch.randn(2, 3, 3), torch.ones(2, 3) > 0)
    loss.backward()
    assert float(loss.detach()) == 0
    assert embedding.grad is not None
    assert not embedding.grad.any()


def test_pick_takes_the_pixel_of_the_index() -> None:
    embedding = torch.randn(2, 5, 3, 4, requires_grad=True)
    pseudo = torch.arange(24).view(2, 3, 4) % 4
    anchors = sample_anchors(pseudo, pseudo, 10, generator())
    rows = anchors.pick(embedding)
    for row, i in zip(rows, anchors.index.tolist(), strict=True):
        assert torch.equal(row, embedding[i // 12, :, i % 12 // 4, i % 4])
    assert rows.requires_grad


def test_prototypes_by_hand() -> None:
    embedding = torch.tensor([[[1.0, 0.0, 5.0]], [[0.0, 1.0, 5.0]]])[None]
    proto, valid = prototypes(embedding, torch.tensor([[[0, 0, IGNORE]]]), classes=2)
    torch.testing.assert_close(proto, torch.tensor([[[math.sqrt(0.5), math.sqrt(0.5)], [0.0, 0.0]]]))
    assert valid.tolist() == [[True, False]]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 5), st.integers(0, 99))
def test_prototypes_equal_the_loop(b: int, k: int, side: int, seed: int) -> None:
    g = generator(seed)
    embedding = torch.randn(b, 6, side, side, generator=g).requires_grad_()
    pseudo = torch.randint(-1, k, (b, side, side), generator=g)
    with torch.autocast("cpu", torch.bfloat16):
        proto, valid = prototypes(embedding, pseudo, k)
    assert not proto.requires_grad
    for i in range(b):
        for c in range(k):
            members = embedding[i].detach()[:, pseudo[i] == c]
            assert bool(valid[i, c]) == (members.shape[1] > 0)
            if members.shape[1]:
                mean = members.mean(1)
                torch.testing.assert_close(proto[i, c], mean / mean.norm(), rtol=1e-4, atol=1e-5)


def slow_class_contrast(f1: Tensor, f2: Tensor, index: Tensor, valid: Tensor, tau: float) -> float:
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


def test_sample_classes_returns_distinct_pixels_of_each_class() -> None:
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


def test_sample_classes_pads_small_maps() -> None:
    index, valid = sample_classes(torch.zeros(1, 2, 2, dtype=torch.int64), 2, 6, torch.Generator().manual_seed(0))
    assert index.shape == (2, 6)
    assert valid.sum(1).tolist() == [4, 0]


def test_class_contrast_equals_the_loop() -> None:
    g = torch.Generator().manual_seed(1)
    f1, f2 = (torch.randn(2, 5, 4, 4, generator=g) for _ in range(2))
    label = torch.randint(-1, 3, (2, 4, 4), generator=g)
    index, valid = sample_classes(label, 4, 5, g)
    assert float(class_contrast(f1, f2, index, valid, 0.5)) == pytest.approx(
        slow_class_contrast(f1, f2, index, valid, 0.5), rel=1e-4
    )


def test_class_contrast_of_separated_and_of_unknown_classes() -> None:
    label = torch.tensor([[[0, 0, 1, 1]]])
    apart = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]).view(1, 2, 1, 4)
    index, valid = sample_classes(label, 2, 2, torch.Generator().manual_seed(0))
    # One positive like the anchor, two negatives at a right angle: -log(e^10 / (e^10 + 2)).
    expected = math.log(1 + 2 * math.exp(-10))
    assert float(class_contrast(apart, apart, index, valid)) == pytest.approx(expected, rel=1e-2)
    assert float(class_contrast(apart, apart, index, torch.zeros_like(valid))) == 0

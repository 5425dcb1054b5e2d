"""Partial cross-entropy (equations 3 and 4) and Dice: by hand and against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pclmix.labels import IGNORE
from pclmix.losses.supervised import (
    SMOOTH,
    SoftLabel,
    dice_loss,
    dual_partial_cross_entropy,
    partial_cross_entropy,
    partial_cross_entropy_soft,
    supervised,
)


def slow_pce(logits: Tensor, label: Tensor) -> float:
    """Pixel by pixel."""
    losses = []
    for b, y, x in [
        (b, y, x) for b in range(label.shape[0]) for y in range(label.shape[1]) for x in range(label.shape[2])
    ]:
        k = int(label[b, y, x])
        if k != IGNORE:
            e = [math.exp(float(v)) for v in logits[b, :, y, x]]
            losses.append(-math.log(e[k] / sum(e)))
    return sum(losses) / len(losses) if losses else 0.0


def logits_of(*probabilities: list[float]) -> Tensor:
    """One image of one row: each argument is a pixel's probabilities."""
    return torch.tensor(probabilities).log().T[None, :, None, :]


def test_pce_by_hand() -> None:
    logits = logits_of([0.5, 0.5], [0.25, 0.75], [0.1, 0.9])
    label = torch.tensor([[[0, 1, IGNORE]]])
    expected = (-math.log(0.5) - math.log(0.75)) / 2
    assert float(partial_cross_entropy(logits, label)) == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_pce_equals_the_loop(b: int, k: int, h: int, w: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(b, k, h, w, generator=g) * 3
    label = torch.randint(-1, k, (b, h, w), generator=g)
    assert float(partial_cross_entropy(logits, label)) == pytest.approx(slow_pce(logits, label), abs=1e-5)


def test_pce_without_scribbles_is_zero_with_a_gradient() -> None:
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    label = torch.full((2, 4, 4), IGNORE)
    for loss in (partial_cross_entropy(logits, label), dual_partial_cross_entropy(logits, logits, label)):
        logits.grad = None
        loss.backward()
        assert float(loss.detach()) == 0
        assert logits.grad is not None
        assert not logits.grad.any()


def test_pce_has_no_gradient_outside_scribbles() -> None:
    logits = torch.randn(1, 3, 2, 2, requires_grad=True)
    partial_cross_entropy(logits, torch.tensor([[[2, IGNORE], [IGNORE, 0]]])).backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(1)[0] > 0).tolist() == [[True, False], [False, True]]


def test_pce_is_stable_and_in_float32() -> None:
    logits = torch.tensor([500.0, -500.0]).view(1, 2, 1, 1)
    assert float(partial_cross_entropy(logits, torch.tensor([[[1]]]))) == 1000
    half = torch.randn(2, 4, 8, 8).bfloat16()
    label = torch.randint(-1, 4, (2, 8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        loss = partial_cross_entropy(half, label)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, partial_cross_entropy(half.float(), label))


def test_pce_gradient() -> None:
    label = torch.tensor([[[0, IGNORE], [2, 1]]])
    logits = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: partial_cross_entropy(x, label), logits)
    soft = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: partial_cross_entropy_soft(x, soft, label >= 0), logits)


def test_soft_pce_by_hand() -> None:
    logits = logits_of([0.5, 0.5], [0.25, 0.75], [0.1, 0.9])
    soft = torch.tensor([[1.0, 0.0], [0.3, 0.7], [1.0, 0.0]]).T[None, :, None, :]
    mask = torch.tensor([[[True, True, False]]])
    expected = (-math.log(0.5) - 0.3 * math.log(0.25) - 0.7 * math.log(0.75)) / 2
    assert float(partial_cross_entropy_soft(logits, soft, mask)) == pytest.approx(expected)
    assert float(partial_cross_entropy_soft(logits, soft, torch.zeros_like(mask))) == 0


def test_soft_pce_of_hard_labels_is_pce() -> None:
    logits, label = torch.randn(2, 4, 5, 6), torch.randint(-1, 4, (2, 5, 6))
    for weight in (0.0, 0.3, 1.0):
        soft = SoftLabel(label, label, torch.full((2, 1, 1), weight))
        result = partial_cross_entropy_soft(logits, soft.dense(4), soft.mask())
        torch.testing.assert_close(result, partial_cross_entropy(logits, label))


def test_soft_label_by_hand() -> None:
    a, b = torch.tensor([[[0, 0, IGNORE, IGNORE]]]), torch.tensor([[[1, IGNORE, 1, IGNORE]]])
    soft = SoftLabel(a, b, torch.full((1, 1, 1), 0.25))
    assert soft.mask().tolist() == [[[True, True, True, False]]]
    torch.testing.assert_close(soft.dense(2), torch.tensor([[[[0.25, 0.25, 0, 0]], [[0.75, 0, 0.75, 0]]]]))


def test_dual_pce_by_hand() -> None:
    c, t, label = logits_of([0.5, 0.5]), logits_of([0.2, 0.8]), torch.tensor([[[1]]])
    expected = -0.6 * math.log(0.5) - 0.4 * math.log(0.8)
    assert float(dual_partial_cross_entropy(c, t, label)) == pytest.approx(expected)
    assert float(dual_partial_cross_entropy(c, t, label, lambda_t=0.0)) == pytest.approx(-math.log(0.5))


def test_dual_pce_of_a_soft_label() -> None:
    c, t = logits_of([0.5, 0.5], [0.1, 0.9]), logits_of([0.2, 0.8], [0.3, 0.7])
    label = SoftLabel(torch.tensor([[[0, IGNORE]]]), torch.tensor([[[1, IGNORE]]]), torch.full((1, 1, 1), 0.25))
    loss_c = -0.25 * math.log(0.5) - 0.75 * math.log(0.5)
    loss_t = -0.25 * math.log(0.2) - 0.75 * math.log(0.8)
    assert float(dual_partial_cross_entropy(c, t, label)) == pytest.approx(0.6 * loss_c + 0.4 * loss_t)


def test_supervised_by_hand() -> None:
    c = [logits_of([0.5, 0.5]), logits_of([0.2, 0.8]), logits_of([0.3, 0.7])]
    labels = [torch.tensor([[[0]]]), torch.tensor([[[1]]]), torch.tensor([[[IGNORE]]])]
    # Each view has its own mean, so the view without a scribble takes nothing from the others.
    assert float(supervised(c, c, labels)) == pytest.approx(-math.log(0.5) - math.log(0.8))


def test_supervised_needs_one_label_per_view() -> None:
    c = [torch.zeros(1, 2, 1, 1)] * 3
    with pytest.raises(ValueError, match="shorter"):
        supervised(c, c, [torch.zeros(1, 1, 1, dtype=torch.int64)])


def slow_dice(p: Tensor, label: Tensor) -> float:
    """Class by class and pixel by pixel."""
    b, k, h, w = p.shape
    scores = []
    for c in range(k):
        both = of_p = of_g = 0.0
        for i, y, x in [(i, y, x) for i in range(b) for y in range(h) for x in range(w)]:
            if label[i, y, x] != IGNORE:
                g = float(label[i, y, x] == c)
                both += float(p[i, c, y, x]) * g
                of_p += float(p[i, c, y, x]) ** 2
                of_g += g
        scores.append((2 * both + SMOOTH) / (of_p + of_g + SMOOTH))
    return 1 - sum(scores) / k


def test_dice_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]).T[None, :, None, :]
    label = torch.tensor([[[0, 1, IGNORE]]])
    # Class 0: 2 * 0.5 / (0.25 + 0.0625 + 1); class 1: 2 * 0.75 / (0.25 + 0.5625 + 1). The third pixel is not known.
    expected = 1 - (1.0 / 1.3125 + 1.5 / 1.8125) / 2
    assert float(dice_loss(p, label)) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2), st.integers(2, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_dice_equals_the_loop(b: int, k: int, h: int, w: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p = torch.randn(b, k, h, w, generator=g).softmax(1)
    label = torch.randint(-1, k, (b, h, w), generator=g)
    assert float(dice_loss(p, label)) == pytest.approx(slow_dice(p, label), abs=1e-5)


def test_a_perfect_prediction_has_no_loss_and_an_unlabelled_batch_no_gradient() -> None:
    label = torch.randint(0, 3, (2, 4, 4))
    perfect = torch.nn.functional.one_hot(label, 3).permute(0, 3, 1, 2).float()
    assert float(dice_loss(perfect, label)) == pytest.approx(0, abs=1e-6)
    p = torch.rand(2, 3, 4, 4, requires_grad=True)
    loss = dice_loss(p, torch.full_like(label, IGNORE))
    loss.backward()
    assert loss.detach() == 0
    assert p.grad is not None
    assert not p.grad.any()


def test_dice_gradient() -> None:
    label = torch.tensor([[[0, IGNORE], [2, 1]]])
    logits = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: dice_loss(z.softmax(1), label), logits)

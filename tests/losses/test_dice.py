from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pclmix.labels import IGNORE
from pclmix.losses.dice import SMOOTH, dice_loss


def slow_dice(p: Tensor, label: Tensor) -> float:
    """Class by class and pixel by pixel, as one would say it."""
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

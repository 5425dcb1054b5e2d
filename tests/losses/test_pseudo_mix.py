from __future__ import annotations

import pytest
import torch

from pclmix.losses.dice import dice_loss
from pclmix.losses.pseudo_mix import mixed_pseudo_label, pseudo_supervision


def test_mixed_pseudo_label_by_hand() -> None:
    p1 = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).T[None, :, None, :]
    p2 = torch.tensor([[0.2, 0.8], [0.3, 0.7]]).T[None, :, None, :]
    # beta 0.5: (0.55, 0.45) and (0.35, 0.65); beta 0.1: (0.27, 0.73) for the first pixel.
    assert mixed_pseudo_label(p1, p2, torch.tensor(0.5)).tolist() == [[[0, 1]]]
    assert mixed_pseudo_label(p1, p2, torch.tensor(0.1)).tolist() == [[[1, 1]]]


def test_pseudo_supervision_is_the_mean_of_two_dice() -> None:
    g = torch.Generator().manual_seed(0)
    p1, p2 = (torch.randn(2, 3, 5, 5, generator=g).softmax(1).requires_grad_() for _ in range(2))
    beta = torch.tensor(0.3)
    label = (0.3 * p1 + 0.7 * p2).argmax(1)
    loss = pseudo_supervision(p1, p2, beta)
    assert float(loss.detach()) == pytest.approx(float((dice_loss(p1, label) + dice_loss(p2, label)).detach()) / 2)
    loss.backward()
    assert p1.grad is not None
    assert p1.grad.any()
    assert p2.grad is not None
    assert p2.grad.any()

from __future__ import annotations

import math

import pytest
import torch

from pclmix.methods.em import normalised_entropy


def test_entropy_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).T[None, :, None, :]
    second = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    assert float(normalised_entropy(p)) == pytest.approx((1 + second) / 2, abs=1e-5)


def test_normalised_entropy_range() -> None:
    assert float(normalised_entropy(torch.full((2, 5, 3, 3), 0.2))) == pytest.approx(1, abs=1e-4)
    sure = torch.zeros(2, 5, 3, 3)
    sure[:, 1] = 1
    assert float(normalised_entropy(sure)) == pytest.approx(0, abs=1e-5)


def test_entropy_gradient_is_finite_at_the_corner() -> None:
    p = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).requires_grad_()
    normalised_entropy(p).backward()
    assert p.grad is not None
    assert p.grad.isfinite().all()

from __future__ import annotations

import math

import pytest
import torch

from pclmix.losses.mean_teacher import confident_mse, follow
from pclmix.losses.ramp import ramp


def test_ramp_by_hand() -> None:
    for t in (0.0, 0.3, 1.0):
        assert float(ramp(torch.tensor(t))) == pytest.approx(math.exp(-5 * (1 - t) ** 2))
    assert float(ramp(torch.tensor(0.25), 0.5)) == pytest.approx(math.exp(-5 * 0.25))
    assert float(ramp(torch.tensor(0.8), 0.5)) == 1


def test_confident_mse_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).T[None, :, None, :]
    target = torch.tensor([[1.0, 0.0], [0.3, 0.7]]).T[None, :, None, :]
    uncertainty = torch.tensor([[[0.1, 0.9]]])
    # Only the first pixel is sure: (0.5^2 + 0.5^2) / 2.
    assert float(confident_mse(p, target, uncertainty, torch.tensor(0.5))) == pytest.approx(0.25)
    assert float(confident_mse(p, target, uncertainty, torch.tensor(1.0))) == pytest.approx((0.25 + 0.01) / 2)
    assert float(confident_mse(p, target, uncertainty, torch.tensor(0.0))) == 0


def test_the_target_has_no_gradient() -> None:
    p, target = (torch.rand(1, 2, 3, 3, requires_grad=True) for _ in range(2))
    confident_mse(p, target, torch.zeros(1, 3, 3), torch.tensor(1.0)).backward()
    assert p.grad is not None
    assert target.grad is None


def test_the_teacher_copies_first_and_then_follows() -> None:
    teacher, student = [torch.zeros(3), torch.zeros(2, 2)], [torch.ones(3), torch.full((2, 2), 4.0)]
    updates = torch.zeros((), dtype=torch.int64)
    follow(teacher, student, updates, 0.99)
    assert [t.tolist() for t in teacher] == [s.tolist() for s in student]
    expected, weights = 1.0, [2.0, -1.0, 0.5]
    for n, value in enumerate(weights, start=1):
        student[0].fill_(value)
        follow(teacher, student, updates, 0.7)
        decay = min(0.7, 1 - 1 / (n + 1))
        expected = decay * expected + (1 - decay) * value
        torch.testing.assert_close(teacher[0], torch.full((3,), expected))
    assert updates == 4

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pclmix.losses.mumford_shah import class_means, mumford_shah, piecewise_constant, total_variation


def slow_energy(p: Tensor, image: Tensor) -> float:
    b, k, h, w = p.shape
    total = 0.0
    for i, c, n in [(i, c, n) for i in range(b) for c in range(k) for n in range(image.shape[1])]:
        weights = [(float(p[i, c, y, x]), float(image[i, n, y, x])) for y in range(h) for x in range(w)]
        mean = sum(a * v for a, v in weights) / sum(a for a, _ in weights)
        total += sum(a * (v - mean) ** 2 for a, v in weights)
    for i, c, y, x in [(i, c, y, x) for i in range(b) for c in range(k) for y in range(h) for x in range(w)]:
        if y + 1 < h:
            total += abs(float(p[i, c, y + 1, x] - p[i, c, y, x]))
        if x + 1 < w:
            total += abs(float(p[i, c, y, x + 1] - p[i, c, y, x]))
    return total


def test_mumford_shah_by_hand() -> None:
    image = torch.tensor([[[[0.0, 1.0]]]])
    p = torch.tensor([[[[0.75, 0.25]], [[0.25, 0.75]]]])
    torch.testing.assert_close(class_means(p, image), torch.tensor([[[0.25], [0.75]]]))
    # Class 0: 0.75 * 0.25^2 + 0.25 * 0.75^2 = 0.1875; class 1 the same; one border of height 0.5 in each class.
    assert float(piecewise_constant(p, image)) == pytest.approx(0.375)
    assert float(total_variation(p)) == pytest.approx(1.0)
    assert float(mumford_shah(p, image)) == pytest.approx(1.375)


@pytest.mark.parametrize("channels", [1, 2])
def test_mumford_shah_equals_the_loop(channels: int) -> None:
    g = torch.Generator().manual_seed(3)
    p, image = torch.randn(2, 3, 4, 5, generator=g).softmax(1), torch.rand(2, channels, 4, 5, generator=g)
    assert float(mumford_shah(p, image)) == pytest.approx(slow_energy(p, image), rel=1e-5)


def test_the_gradient_through_the_class_means_is_zero() -> None:
    image = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    logits = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: piecewise_constant(z.softmax(1), image), logits)


def test_a_class_that_is_nowhere_is_no_trouble() -> None:
    p = torch.zeros(1, 2, 3, 3)
    p[:, 0] = 1
    assert class_means(p, torch.rand(1, 1, 3, 3)).isfinite().all()

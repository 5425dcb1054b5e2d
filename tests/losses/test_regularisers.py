"""The Mumford-Shah energy and the gated CRF: by hand and against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pclmix.losses.unlabelled import class_means, gated_crf, mumford_shah, piecewise_constant, total_variation


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


def test_gradient_through_class_means_is_zero() -> None:
    image = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    logits = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: piecewise_constant(z.softmax(1), image), logits)


def test_class_means_of_an_absent_class() -> None:
    p = torch.zeros(1, 2, 3, 3)
    p[:, 0] = 1
    assert class_means(p, torch.rand(1, 1, 3, 3)).isfinite().all()


def slow_crf(p: Tensor, image: Tensor, sigma_xy: float, sigma_i: float, radius: int) -> float:
    """Over every ordered pair of pixels."""
    b, _, h, w = p.shape
    total = 0.0
    places = [(y, x) for y in range(h) for x in range(w)]
    for i in range(b):
        for (y, x), (v, u) in [(s, t) for s in places for t in places if s != t]:
            if abs(y - v) <= radius and abs(x - u) <= radius:
                far = ((y - v) ** 2 + (x - u) ** 2) / (2 * sigma_xy**2)
                unlike = float((image[i, :, y, x] - image[i, :, v, u]).square().sum()) / (2 * sigma_i**2)
                total += math.exp(-far - unlike) * (1 - float((p[i, :, y, x] * p[i, :, v, u]).sum()))
    return total / (b * h * w)


def test_gated_crf_by_hand() -> None:
    p = torch.tensor([[1.0, 0.0], [0.25, 0.75]]).T[None, :, None, :]
    image = torch.tensor([[[[0.5, 0.6]]]])
    # One pair, counted both ways, over two pixels: k (1 - 0.25).
    kernel = math.exp(-1 / (2 * 36) - 0.1**2 / (2 * 0.1**2))
    assert float(gated_crf(p, image)) == pytest.approx(0.75 * kernel, rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 5), st.integers(1, 5), st.integers(1, 2), st.integers(1, 6), st.integers(0, 99)
)
def test_gated_crf_equals_the_loop(b: int, h: int, w: int, channels: int, radius: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p = torch.randn(b, 3, h, w, generator=g).softmax(1)
    image = torch.rand(b, channels, h, w, generator=g)
    expected = slow_crf(p, image, 2.0, 0.4, radius)
    assert float(gated_crf(p, image, 2.0, 0.4, radius)) == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_gated_crf_gradient_is_that_of_the_energy() -> None:
    image = torch.rand(1, 1, 4, 3, dtype=torch.float64)
    logits = torch.randn(1, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: gated_crf(z.softmax(1), image, 2.0, 0.3, 2), logits)


def test_gated_crf_of_one_class_is_zero() -> None:
    p = torch.zeros(1, 3, 8, 8)
    p[:, 2] = 1
    assert float(gated_crf(p, torch.rand(1, 1, 8, 8))) == pytest.approx(0, abs=1e-5)

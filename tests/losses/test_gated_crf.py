from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pclmix.losses.gated_crf import gated_crf


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


def test_one_class_everywhere_costs_nothing() -> None:
    p = torch.zeros(1, 3, 8, 8)
    p[:, 2] = 1
    assert float(gated_crf(p, torch.rand(1, 1, 8, 8))) == pytest.approx(0, abs=1e-5)

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import Tensor

from pclmix.losses.largest_component import components, largest_components, without_islands

TOUCHING = np.ones((3, 3))


def same_parts(number: Tensor, mask: Tensor) -> bool:
    """Whether the numbering is the one of an independent implementation, up to names."""
    expected, count = ndimage.label(mask.numpy(), TOUCHING)
    pairs = {(int(a), int(b)) for a, b in zip(number.flatten(), expected.flatten(), strict=True)}
    return (
        len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) and len(pairs) == count + (~mask).any()
    )


def spiral(side: int) -> Tensor:
    """One path of one pixel's width from the corner to the centre, with gaps of one pixel."""
    mask = torch.zeros(side, side, dtype=torch.bool)
    y, x, (dy, dx) = 0, 0, (0, 1)
    mask[y, x] = True
    turns = 0
    while turns < 2:
        ahead, beyond = (y + dy, x + dx), (y + 2 * dy, x + 2 * dx)
        inside = all(0 <= v < side for v in ahead)
        if inside and not mask[ahead] and not (all(0 <= v < side for v in beyond) and mask[beyond]):
            (y, x), turns = ahead, 0
            mask[y, x] = True
        else:
            (dy, dx), turns = (dx, -dy), turns + 1
    return mask


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 0.9), st.integers(0, 999))
def test_components_equal_scipy(h: int, w: int, density: float, seed: int) -> None:
    mask = torch.rand(2, h, w, generator=torch.Generator().manual_seed(seed)) < density
    for number, one in zip(components(mask), mask, strict=True):
        assert same_parts(number, one)


@pytest.mark.parametrize("density", [0.3, 0.4, 0.45, 0.6])
def test_noise_at_full_size(density: float) -> None:
    mask = torch.rand(1, 256, 256, generator=torch.Generator().manual_seed(1)) < density
    assert same_parts(components(mask)[0], mask[0])


@pytest.mark.parametrize("side", [16, 64, 256])
def test_a_spiral_is_one(side: int) -> None:
    mask = spiral(side)
    assert mask.sum() > side * side / 3
    for turned in (mask, mask.flip(0), mask.T, mask.flip(0, 1)):
        assert same_parts(components(turned[None])[0], turned)


def test_largest_by_hand() -> None:
    label = torch.tensor([[[1, 1, 0, 1], [0, 0, 0, 2], [2, 2, 2, 0]], [[0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0]]])
    expected = [[[1, 1, 0, 0], [0, 0, 0, 2], [2, 2, 2, 0]], [[0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0]]]
    assert largest_components(label, 4).tolist() == expected


def test_islands_become_background() -> None:
    p = torch.tensor([[[0.1, 0.2, 0.8, 0.3]], [[0.9, 0.8, 0.2, 0.7]]])[None]
    target = without_islands(p)
    torch.testing.assert_close(target[0, :, 0, 3], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(target[..., :3], p[..., :3])

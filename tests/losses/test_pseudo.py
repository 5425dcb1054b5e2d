"""Pseudo labels: random walker, superpixels, running means, largest components."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import Tensor

from pclmix.config import Augment
from pclmix.data.batch import draw_affine
from pclmix.labels import IGNORE
from pclmix.losses.pseudo import (
    RunningMean,
    components,
    confident_class,
    identity,
    invert,
    largest_components,
    random_walker_labels,
    superpixels,
    walk_scribbles,
)


def blocks(*values: float) -> np.ndarray:
    """Vertical bands of 8 columns, 16 rows."""
    return np.repeat(np.array(values, dtype=np.float32), 8)[None, None].repeat(16, axis=1)


def test_random_walker_fills_bands() -> None:
    scribble = np.full((16, 24), IGNORE, dtype=np.int16)
    scribble[8, 2], scribble[8, 12], scribble[8, 20] = 0, 1, 2
    found = random_walker_labels(blocks(0.1, 0.5, 0.9), scribble)
    assert found.dtype == np.int16
    assert (found == np.repeat([0, 1, 2], 8)[None]).mean() > 0.97
    assert (found[scribble >= 0] == scribble[scribble >= 0]).all()


def test_random_walker_keeps_class_numbers() -> None:
    scribble = np.full((16, 24), IGNORE, dtype=np.int16)
    scribble[8, 2], scribble[8, 20] = 0, 3
    found = random_walker_labels(blocks(0.1, 0.1, 0.9), scribble)
    assert set(np.unique(found)) == {0, 3}
    assert (found[:, 17:] == 3).all()


@pytest.mark.parametrize(("drawn", "elsewhere"), [([], IGNORE), ([0], 0), ([2], IGNORE)])
def test_random_walker_with_fewer_than_two_classes(drawn: list[int], elsewhere: int) -> None:
    scribble = np.full((8, 16), IGNORE, dtype=np.int16)
    for k in drawn:
        scribble[4, 3] = k
    found = random_walker_labels(blocks(0.2, 0.7)[:, :8], scribble)
    assert found[0, 0] == elsewhere
    assert (found[scribble >= 0] == scribble[scribble >= 0]).all()


def test_random_walker_on_a_constant_image_uses_distance() -> None:
    scribble = np.full((16, 16), IGNORE, dtype=np.int16)
    scribble[8, 0], scribble[8, 15] = 1, 2
    found = random_walker_labels(np.full((1, 16, 16), 0.5, np.float32), scribble)
    assert (found[:, :7] == 1).all()
    assert (found[:, 9:] == 2).all()


def slow_walk(image: np.ndarray, scribble: np.ndarray) -> np.ndarray:
    """Grady's linear system: the probability that a walker from each pixel reaches each class first."""
    grey = (image[0].astype(float) + 0.35) / 1.7 * 2 - 1
    h, w = grey.shape
    laplacian = np.zeros((h * w, h * w))
    for y, x in np.ndindex(h, w):
        for v, u in ((y + 1, x), (y, x + 1)):
            if v < h and u < w:
                weight = np.exp(-100 * (grey[y, x] - grey[v, u]) ** 2 / (10 * grey.std())) + 1e-10
                i, j = y * w + x, v * w + u
                laplacian[[i, j], [i, j]] += weight
                laplacian[[i, j], [j, i]] -= weight
    flat = scribble.ravel()
    free, classes = flat == IGNORE, np.unique(flat[flat != IGNORE])
    drawn = (flat[~free, None] == classes[None]).astype(float)
    reached = np.linalg.solve(laplacian[np.ix_(free, free)], -laplacian[np.ix_(free, ~free)] @ drawn)
    found = flat.copy()
    found[free] = classes[reached.argmax(1)]
    return found.reshape(h, w)


@pytest.mark.parametrize("seed", range(4))
def test_random_walker_equals_the_linear_system(seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = rng.random((1, 12, 10)).astype(np.float32)
    scribble = np.full((12, 10), IGNORE, dtype=np.int16)
    scribble[rng.integers(0, 12, 9), rng.integers(0, 10, 9)] = np.repeat([0, 1, 3], 3)
    found = random_walker_labels(image, scribble)
    assert (found == slow_walk(image, scribble)).all()
    assert not np.array_equal(found, random_walker_labels(image, scribble, beta=1.0))


def test_random_walker_on_a_chain_of_three_pixels() -> None:
    image = np.array([[[0.0, 0.2, 1.0]]], dtype=np.float32)
    scribble = np.array([[1, IGNORE, 2]], dtype=np.int16)
    assert random_walker_labels(image, scribble).tolist() == [[1, 1, 2]]
    assert random_walker_labels(image[..., ::-1].copy(), scribble).tolist() == [[1, 2, 2]]


def test_walk_scribbles_by_hand() -> None:
    numbers = np.array([[0, 0, 1, 1], [2, 2, 3, 3]])
    scribble = np.array([[1, IGNORE, 0, 2], [IGNORE, IGNORE, IGNORE, 0]], dtype=np.int16)
    # 0 touches class 1; 1 touches two classes and keeps what was drawn; 2 touches none; 3 touches background.
    assert walk_scribbles(numbers, scribble).tolist() == [[1, 1, 0, 2], [IGNORE, IGNORE, 0, 0]]


def test_walk_scribbles_without_scribbles() -> None:
    scribble = np.full((4, 4), IGNORE, dtype=np.int16)
    assert (walk_scribbles(np.arange(16).reshape(4, 4), scribble) == IGNORE).all()


def test_superpixels_follow_the_image() -> None:
    image = np.zeros((1, 64, 64), dtype=np.float32)
    image[:, :, 23:41] = 1
    numbers = superpixels(image)
    assert numbers.shape == (64, 64)
    assert np.array_equal(np.unique(numbers), np.arange(numbers.max() + 1))
    assert 100 < numbers.max() < 300
    values = [np.unique(image[0][numbers == n]) for n in range(numbers.max() + 1)]
    assert np.mean([len(v) == 1 for v in values]) > 0.95


def test_superpixels_of_a_constant_image() -> None:
    assert superpixels(np.zeros((1, 64, 64), np.float32)).max() > 50


def prediction(seed: int, classes: int = 3, side: int = 16) -> torch.Tensor:
    """Smooth probabilities, so that resampling loses little."""
    coarse = torch.randn(2, classes, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").softmax(1)


def test_running_mean_weights_predictions_by_alpha() -> None:
    memory = RunningMean(4, 3, (16, 16), stride=1)
    theta, index = identity(2, torch.zeros(1)), torch.tensor([3, 1])
    first, second = prediction(0), prediction(1)
    assert not memory.read(index, theta).any()
    memory.update(index, first, theta, 0.2)
    torch.testing.assert_close(memory.read(index, theta), first, atol=0.02, rtol=0)
    memory.update(index, second, theta, 0.2)
    # Weights 0.16 and 0.2 of what was seen.
    expected = (0.16 * first + 0.2 * second) / 0.36
    torch.testing.assert_close(memory.read(index, theta), expected, atol=0.02, rtol=0)
    assert not memory.mean[0].any()
    assert not memory.mean[2].any()


def test_running_mean_forgets_old_predictions() -> None:
    memory, old, new = RunningMean(2, 3, (64, 64), stride=2), prediction(0, side=64), prediction(1, side=64)
    theta, index = identity(2, old), torch.arange(2)
    memory.update(index, old, theta, 0.2)
    for _ in range(40):
        memory.update(index, new, theta, 0.2)
    torch.testing.assert_close(memory.read(index, theta), new, atol=0.08, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_running_mean_undoes_augmentation(seed: int) -> None:
    """Two turned views of one prediction give back the untouched one."""
    memory, own = RunningMean(2, 3, (32, 32), stride=1), prediction(2, side=32)
    index, generator = torch.arange(2), torch.Generator().manual_seed(seed)
    for _ in range(2):
        theta = draw_affine(2, (32, 32), Augment(quarter_turns=1.0), generator)
        grid = torch.nn.functional.affine_grid(theta, [2, 1, 32, 32], align_corners=False)
        turned = torch.nn.functional.grid_sample(own, grid, align_corners=False)
        memory.update(index, turned, theta, 0.5)
        torch.testing.assert_close(memory.read(index, theta), turned, atol=0.03, rtol=0)
    torch.testing.assert_close(memory.read(index, identity(2, own)), own, atol=0.03, rtol=0)


def test_running_mean_keeps_pixels_moved_out_of_the_image() -> None:
    memory, index = RunningMean(1, 2, (8, 8), stride=1), torch.tensor([0])
    left = torch.tensor([0.9, 0.1]).view(1, 2, 1, 1).expand(1, 2, 8, 8)
    right = torch.tensor([0.1, 0.9]).view(1, 2, 1, 1).expand(1, 2, 8, 8)
    memory.update(index, left, identity(1, left), 0.5)
    half = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])  # the batch shows the right half, and black beside it
    memory.update(index, right, half, 0.5)
    after = memory.read(index, identity(1, left))
    torch.testing.assert_close(after[0, 0, :, 0], torch.full((8,), 0.9), atol=0.02, rtol=0)
    assert (after[0, 0, :, 7] < 0.5).all()


def test_invert() -> None:
    theta = draw_affine(6, (64, 48), Augment(scale=0.3, shift=0.2), torch.Generator().manual_seed(0))

    def square(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, torch.tensor([0.0, 0.0, 1.0]).expand(len(t), 1, 3)], dim=1)

    torch.testing.assert_close(square(theta) @ square(invert(theta)), torch.eye(3).expand(6, 3, 3), atol=1e-5, rtol=0)


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
def test_components_of_noise_equal_scipy(density: float) -> None:
    mask = torch.rand(1, 256, 256, generator=torch.Generator().manual_seed(1)) < density
    assert same_parts(components(mask)[0], mask[0])


@pytest.mark.parametrize("side", [16, 64, 256])
def test_components_of_a_spiral(side: int) -> None:
    mask = spiral(side)
    assert mask.sum() > side * side / 3
    for turned in (mask, mask.flip(0), mask.T, mask.flip(0, 1)):
        assert same_parts(components(turned[None])[0], turned)


def test_largest_components_by_hand() -> None:
    label = torch.tensor([[[1, 1, 0, 1], [0, 0, 0, 2], [2, 2, 2, 0]], [[0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0]]])
    expected = [[[1, 1, 0, 0], [0, 0, 0, 2], [2, 2, 2, 0]], [[0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0]]]
    assert largest_components(label, 4).tolist() == expected


def test_confident_class_by_hand() -> None:
    p = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]]).T[None, :, None, :]
    assert confident_class(p, 0.5).tolist() == [[[0, IGNORE, 1]]]
    assert confident_class(p, 0.85).tolist() == [[[0, IGNORE, IGNORE]]]

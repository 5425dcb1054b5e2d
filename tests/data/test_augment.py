"""Augmentation: one random map for an image and its labels, exact for quarter turns, IGNORE from outside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from pclmix.config import Augment
from pclmix.data.batch import Pinch, augment, draw_affine, draw_pinch, intensity, warp
from pclmix.labels import IGNORE

SIZES = st.tuples(st.integers(4, 20), st.integers(4, 20))
NOTHING = Augment(quarter_turns=0, rotate=0)


def pair(count: int, size: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    g = Generator().manual_seed(seed)
    return torch.rand(count, 1, *size, generator=g), torch.randint(IGNORE, 4, (count, 2, *size), generator=g)


def turns_and_flips(x: Tensor) -> list[Tensor]:
    """All eight symmetries of a square; the four of another rectangle."""
    quarters = range(4) if x.shape[-1] == x.shape[-2] else (0, 2)
    turned = [torch.rot90(x, k, (-2, -1)) for k in quarters]
    return [*turned, *(t.flip(-1) for t in turned)]


@given(SIZES, st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_quarter_turns_and_flips_move_pixels(size: tuple[int, int], seed: int) -> None:
    image, label = pair(6, size)
    moved, moved_label, _ = augment(image, label, Augment(quarter_turns=1), Generator().manual_seed(seed))
    for n in range(6):
        # The same one of the eight for the image and for both of its label maps.
        ways = zip(turns_and_flips(image[n]), turns_and_flips(label[n]), strict=True)
        assert any(torch.allclose(moved[n], x, atol=1e-4) and torch.equal(moved_label[n], y) for x, y in ways)


def test_all_turns_and_flips_are_drawn() -> None:
    image = torch.arange(9.0).view(1, 1, 3, 3).expand(200, 1, 3, 3) / 8
    moved, _, _ = augment(image, image.long(), Augment(quarter_turns=1), Generator().manual_seed(0))
    assert len({tuple((8 * m).round().int().flatten().tolist()) for m in moved}) == 8


@given(SIZES, st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_image_and_labels_go_the_same_way(size: tuple[int, int], seed: int) -> None:
    """The image holds its coordinates, one per channel; the labels hold the nearest ones."""
    h, w = size
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    label = torch.stack([y, x])[None].expand(4, 2, h, w)
    config = Augment(quarter_turns=0.5, rotate=1, degrees=45, scale=0.3, shift=0.2)
    theta = draw_affine(4, size, config, Generator().manual_seed(seed))
    # One more than the coordinate, and a channel of ones: where that one is 1 no border was blended in.
    image = torch.cat([label.float(), torch.ones(4, 1, h, w)], dim=1)
    moved, moved_label = warp(image, label, theta)
    inside = moved[:, 2:] > 1 - 1e-5
    distance = (moved[:, :2] - moved_label).abs()
    assert distance[inside.expand_as(distance)].le(0.5 + 1e-3).all()
    # Labels are filled with IGNORE exactly where the nearest pixel lies outside, and never hold anything new.
    outside = moved_label == IGNORE
    assert torch.equal(outside[:, 0], outside[:, 1])
    assert not (outside[:, :1] & inside).any()
    assert moved_label[:, 0].max() < h
    assert moved_label[:, 1].max() < w


@given(SIZES, st.floats(-180, 180))
@settings(max_examples=40, deadline=None)
def test_a_rotation_keeps_distances_in_pixels(size: tuple[int, int], degrees: float) -> None:
    """On an image that is not square, too: a circle stays a circle."""
    config = Augment(quarter_turns=0, rotate=1, degrees=abs(degrees))
    theta = draw_affine(3, size, config, Generator().manual_seed(1))
    h, w = size
    pixels = torch.diag(torch.tensor([w / 2, h / 2]))
    for matrix in theta[:, :, :2]:
        turn = pixels @ matrix @ torch.linalg.inv(pixels)
        torch.testing.assert_close(turn @ turn.T, torch.eye(2), atol=1e-4, rtol=0)
        assert torch.linalg.det(turn) > 0


def test_augmentation_off_changes_nothing() -> None:
    image, label = pair(3, (8, 12))
    moved, moved_label, theta = augment(image, label, NOTHING, Generator().manual_seed(0))
    torch.testing.assert_close(moved, image, atol=1e-5, rtol=0)
    assert torch.equal(moved_label, label)
    assert torch.equal(theta, torch.eye(2, 3).expand(3, 2, 3))


def test_pixels_from_outside_are_not_annotated() -> None:
    theta = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])  # half the width to the left
    image, label = torch.ones(1, 1, 4, 4), torch.full((1, 1, 4, 4), 2)
    moved, moved_label = warp(image, label, theta)
    assert moved_label[0, 0].tolist() == [[2, 2, IGNORE, IGNORE]] * 4
    assert moved[0, 0, 0].tolist() == pytest.approx([1, 1, 0, 0], abs=1e-6)
    assert moved_label.dtype == torch.int64


def test_augmentation_probabilities() -> None:
    """With p 0.5 a quarter turn and flip, else with p 0.5 a rotation within 20 degrees, else nothing."""
    theta = draw_affine(4000, (8, 8), Augment(), Generator().manual_seed(0))
    still = (theta[:, :, :2] == torch.eye(2)).all(dim=(1, 2))
    exact = (theta[:, :, :2].abs().round() == theta[:, :, :2].abs()).all(dim=(1, 2))
    assert float((~exact).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert float(still.float().mean()) == pytest.approx(0.25 + 0.5 / 8, abs=0.03)
    tilt = torch.rad2deg(torch.atan2(theta[~exact, 1, 0], theta[~exact, 0, 0]))
    assert tilt.abs().max() <= 20
    assert tilt.min() < -15
    assert tilt.max() > 15


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_intensities_stay_in_range(gamma: float, contrast: float, noise: float, seed: int) -> None:
    image, _ = pair(3, (6, 5), seed)
    config = Augment(gamma=gamma, contrast=contrast, noise=noise)
    changed = intensity(image, config, Generator().manual_seed(seed))
    assert changed.shape == image.shape
    assert changed.isfinite().all()
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_the_same_generator_gives_the_same() -> None:
    image, label = pair(4, (16, 16))
    config = Augment(scale=0.2, shift=0.1, gamma=0.3, contrast=0.2, noise=0.1)
    one, two = (augment(image, label, config, Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    other = augment(image, label, config, Generator().manual_seed(6))
    assert not torch.equal(one[0], other[0])


def test_a_pinch_shrinks_around_its_centre_by_hand() -> None:
    """s = 1, R = 8: what is seen at distance 2 comes from 2 (1 + (1 - 2 / 8)^2) = 3.125; beyond 8 nothing moves."""
    grid = torch.nn.functional.affine_grid(torch.eye(2, 3)[None], [1, 1, 33, 33], align_corners=False)
    moved = Pinch(torch.zeros(1, 2), torch.tensor([1.0]), torch.tensor([8.0]))(grid)
    pixels = moved[0, 16, :, 0] * 33 / 2  # distances from the centre along the middle row
    assert pixels[16].item() == pytest.approx(0, abs=1e-5)
    assert pixels[18].item() == pytest.approx(3.125, abs=1e-4)
    assert torch.allclose(moved[0, 16, 24:], grid[0, 16, 24:], atol=1e-6)


@given(st.floats(0.05, 1.29), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_a_pinch_never_folds(log_range: float, seed: int) -> None:
    label = torch.full((4, 32, 32), IGNORE)
    label[:, 10:20, 12:18] = 1
    grid = torch.nn.functional.affine_grid(torch.eye(2, 3).repeat(4, 1, 1), [4, 1, 32, 32], align_corners=False)
    pinch = draw_pinch(label, log_range, Generator().manual_seed(seed))
    moved = pinch(grid)
    for n in range(4):  # along the row and the column through the centre order is kept
        column, row = ((pinch.centre[n] + 1) * 16).long().tolist()
        assert (moved[n, row, :, 0].diff() > 0).all()
        assert (moved[n, :, column, 1].diff() > 0).all()


def test_a_pinch_is_around_a_stroke_of_a_structure_and_none_where_there_is_none() -> None:
    label = torch.zeros(3, 16, 24, dtype=torch.long)
    label[0, 3, 20] = 2
    label[1].fill_(IGNORE)
    pinch = draw_pinch(label, 0.5, Generator().manual_seed(0))
    assert pinch.centre[0].tolist() == pytest.approx([20.5 / 12 - 1, 3.5 / 8 - 1])
    assert pinch.strength[0] != 0
    assert pinch.strength[1:].tolist() == [0, 0]
    image = torch.rand(3, 1, 16, 24)
    moved, moved_label = warp(image, label[:, None], torch.eye(2, 3).repeat(3, 1, 1), pinch)
    assert torch.allclose(moved[1:], image[1:], atol=1e-5)
    assert torch.equal(moved_label[1:, 0], label[1:])


def test_random_draws_do_not_depend_on_pinch() -> None:
    image, label = pair(3, (12, 12))
    plain = augment(image, label, Augment(scale=0.2), Generator().manual_seed(5))
    drawn = augment(image, label, Augment(scale=0.2, pinch=0.4), Generator().manual_seed(5))
    assert torch.equal(plain[2], drawn[2])
    assert not torch.allclose(plain[0], drawn[0])

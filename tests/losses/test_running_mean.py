from __future__ import annotations

import pytest
import torch

from pclmix.config import Augment
from pclmix.data.augment import draw_affine
from pclmix.labels import IGNORE
from pclmix.losses.running_mean import RunningMean, confident_label, identity, invert


def prediction(seed: int, classes: int = 3, side: int = 16) -> torch.Tensor:
    """Smooth probabilities, so that resampling loses little."""
    coarse = torch.randn(2, classes, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").softmax(1)


def test_the_first_prediction_counts_fully_and_the_next_by_alpha() -> None:
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


def test_many_updates_forget_the_start() -> None:
    memory, old, new = RunningMean(2, 3, (64, 64), stride=2), prediction(0, side=64), prediction(1, side=64)
    theta, index = identity(2, old), torch.arange(2)
    memory.update(index, old, theta, 0.2)
    for _ in range(40):
        memory.update(index, new, theta, 0.2)
    torch.testing.assert_close(memory.read(index, theta), new, atol=0.08, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_augmented_predictions_meet_in_the_slices_own_frame(seed: int) -> None:
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


def test_what_was_moved_out_of_the_image_keeps_its_mean() -> None:
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


def test_confident_label_by_hand() -> None:
    mean = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.1, 0.9], [0.0, 0.0]]).T[None, :, None, :]
    label = torch.tensor([[[IGNORE, IGNORE, 0, IGNORE]]])
    assert confident_label(mean, label, 0.8).tolist() == [[[0, IGNORE, IGNORE, IGNORE]]]

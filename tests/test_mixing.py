from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.losses.supervised import SoftLabel
from pclmix.mixing import (
    MIXERS,
    Blend,
    CutMix,
    Erase,
    MixUp,
    SaliencyMix,
    Select,
    local_contrast,
    make_mixer,
    rectangles,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def box(mask: Tensor) -> tuple[int, int, int, int]:
    """Top, left, height, width of what is set in (H, W)."""
    y, x = mask.nonzero().T
    return int(y.min()), int(x.min()), int(y.max() - y.min() + 1), int(x.max() - x.min() + 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(8, 70), st.integers(8, 70), st.floats(0.05, 0.9), st.integers(0, 999))
def test_rectangles_are_one_rectangle_of_the_area(b: int, h: int, w: int, area: float, seed: int) -> None:
    masks = rectangles(torch.zeros(b, 1, h, w), area, generator(seed))
    assert masks.shape == (b, 1, h, w)
    for mask in masks[:, 0]:
        _, _, height, width = box(mask)
        assert int(mask.sum()) == height * width, "a full rectangle"
        # One side is rounded by at most half a pixel, times the other side.
        assert abs(height * width - area * h * w) <= max(h, w) / 2 + 1e-3


def test_rectangles_vary_in_shape_and_reach_every_pixel() -> None:
    masks = rectangles(torch.zeros(2000, 1, 32, 32), 0.2, generator())[:, 0]
    shapes = {box(m)[2:] for m in masks}
    assert min(h for h, _ in shapes) <= 8
    assert max(h for h, _ in shapes) >= 30
    assert masks.any(0).all()
    assert masks.float().mean().item() == pytest.approx(0.2, abs=0.01)
    # Neither direction is favoured.
    tall = sum(h > w for h, w in (box(m)[2:] for m in masks))
    assert 800 < tall < 1200


def test_rectangles_on_one_pixel() -> None:
    assert int(rectangles(torch.zeros(1, 1, 1, 1), 0.2, generator()).sum()) == 1


def test_cutmix_by_hand() -> None:
    mix = Select(torch.tensor([[[[True, False]]]]))
    a, b = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0]]]])
    assert mix.images(a, b).tolist() == [[[[1.0, 4.0]]]]
    assert mix.images(b, a).tolist() == [[[[3.0, 2.0]]]], "the other direction"
    y1, y2 = torch.tensor([[[2, IGNORE]]]), torch.tensor([[[0, 1]]])
    assert mix.labels(y1, y2).tolist() == [[[2, 1]]]
    assert mix.labels(y2, y1).tolist() == [[[0, IGNORE]]]


def test_cutmix_selects_labels_and_predictions_as_images() -> None:
    x1, x2 = torch.rand(3, 1, 16, 16), torch.rand(3, 1, 16, 16) + 2
    mix = CutMix().draw(x1, x2, generator())
    of_one = mix.images(x1, x2) < 2
    y1, y2 = torch.randint(-1, 4, (3, 16, 16)), torch.randint(-1, 4, (3, 16, 16))
    assert torch.equal(mix.labels(y1, y2), torch.where(of_one[:, 0], y1, y2))
    p1, p2 = torch.rand(3, 4, 16, 16), torch.rand(3, 4, 16, 16)
    assert torch.equal(mix.predictions(p1, p2), torch.where(of_one, p1, p2))
    assert torch.equal(mix.predictions(p2, p1), torch.where(of_one, p2, p1))


def test_cutout_by_hand() -> None:
    mix = Erase(torch.tensor([[[[True, False]]]]))
    a, b = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0]]]])
    assert mix.images(a, b).tolist() == [[[[0.0, 2.0]]]]
    assert mix.labels(torch.tensor([[[1, 2]]]), torch.tensor([[[0, 0]]])).tolist() == [[[IGNORE, 2]]]
    assert mix.predictions(a, b).tolist() == [[[[0.0, 2.0]]]]


def test_mixup_by_hand() -> None:
    mix = Blend(torch.full((1, 1, 1, 1), 0.25))
    a, b = torch.tensor([[[[4.0, 8.0]]]]), torch.tensor([[[[0.0, 4.0]]]])
    assert mix.images(a, b).tolist() == [[[[1.0, 5.0]]]]
    assert mix.predictions(b, a).tolist() == [[[[3.0, 7.0]]]]
    soft = mix.labels(torch.tensor([[[0, IGNORE]]]), torch.tensor([[[1, IGNORE]]]))
    assert soft.dense(2)[0, :, 0].tolist() == [[0.25, 0.0], [0.75, 0.0]]
    assert soft.mask().tolist() == [[[True, False]]]


@pytest.mark.parametrize(("alpha", "variance"), [(1.0, 1 / 12), (4.0, 1 / 36), (0.2, 1 / 5.6)])
def test_mixup_weights_are_beta(alpha: float, variance: float) -> None:
    x = torch.zeros(20000, 1, 1, 1)
    weight = MixUp(alpha).draw(x, x, generator()).weight
    assert weight.shape == (20000, 1, 1, 1)
    assert weight.isfinite().all()
    assert weight.mean().item() == pytest.approx(0.5, abs=0.02)
    assert weight.var().item() == pytest.approx(variance, rel=0.05)


def test_saliency_mix_takes_the_salient_blocks() -> None:
    of_a, of_b = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)
    of_a[:, :2, :2] = 1
    of_a[:, 6:, 6:] = 1
    of_b[:, 6:, 6:] = 3
    x = torch.zeros(1, 1, 8, 8)
    mix = SaliencyMix(area=1 / 16, block=2, smooth=0).draw(x, x, generator(), (of_a, of_b))
    assert box(mix.mask[0, 0]) == (0, 0, 2, 2)
    assert int(mix.mask.sum()) == 4


def test_saliency_mix_maximises_the_gain() -> None:
    of_a, of_b = torch.rand(3, 8, 8), torch.rand(3, 8, 8)
    x = torch.zeros(3, 1, 8, 8)
    mask = SaliencyMix(area=0.25, block=2, smooth=0).draw(x, x, generator(), (of_a, of_b)).mask
    gain = (
        (of_a / of_a.sum((1, 2), keepdim=True) - of_b / of_b.sum((1, 2), keepdim=True)).view(3, 4, 2, 4, 2).sum((2, 4))
    )
    chosen = mask[:, 0, ::2, ::2]
    for i in range(3):
        assert int(chosen[i].sum()) == 4
        assert gain[i][chosen[i]].min() >= gain[i][~chosen[i]].max()


def test_saliency_mix_defaults_to_contrast_and_breaks_ties_at_random() -> None:
    step = torch.zeros(1, 1, 4, 4)
    step[..., 2:] = 1
    assert local_contrast(step)[0].tolist() == [[0, 1, 0, 0]] * 4
    flat = torch.zeros(1, 1, 64, 64)
    masks = [SaliencyMix(block=8).draw(flat, flat, generator(s)).mask for s in range(2)]
    assert not torch.equal(*masks)


@pytest.mark.parametrize("shape", [(1, 1, 7, 5), (2, 3, 33, 64), (3, 1, 256, 256)])
@pytest.mark.parametrize("name", MIXERS.names())
def test_mixers_keep_shapes_and_are_reproducible_by_seed(name: str, shape: tuple[int, int, int, int]) -> None:
    b, _, h, w = shape
    a, c = torch.rand(shape), torch.rand(shape)
    y1, y2 = torch.randint(-1, 3, (b, h, w)), torch.randint(-1, 3, (b, h, w))
    mix, again = (make_mixer(name).draw(a, c, generator(3)) for _ in range(2))
    assert mix.images(a, c).shape == shape
    assert torch.equal(mix.images(a, c), again.images(a, c))
    assert mix.predictions(torch.rand(b, 3, h, w), torch.rand(b, 3, h, w)).shape == (b, 3, h, w)
    label = mix.labels(y1, y2)
    if isinstance(label, SoftLabel):
        assert label.dense(3).shape == (b, 3, h, w)
        assert label.mask().shape == (b, h, w)
    else:
        assert label.dtype == torch.int64
        assert label.shape == (b, h, w)


@pytest.mark.parametrize("name", MIXERS.names())
def test_every_mixer_draws_for_each_sample(name: str) -> None:
    x = torch.rand(8, 1, 64, 64)
    mix = make_mixer(name).draw(x, x.flip(0), generator())
    ones, zeros = torch.ones_like(x), torch.zeros_like(x)
    assert len(mix.images(ones, zeros).flatten(1).unique(dim=0)) > 1


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("cutmx", {}, "unknown mixing function 'cutmx'. Did you mean 'cutmix'?"),
        ("cutmix", {"aria": 0.3}, "cutmix has no parameter 'aria'. Did you mean 'area'?"),
        ("cutmix", {"area": 1.5}, "cutmix: area is 1.5"),
        ("cutout", {"area": 0}, "cutout: area is 0"),
        ("mixup", {"alpha": -1.0}, "mixup: alpha is -1.0"),
        ("saliency", {"block": 0}, "saliency: block 0"),
    ],
)
def test_refuses_invalid_parameters(name: str, parameters: dict[str, float], message: str) -> None:
    with pytest.raises(PclmixError, match=message.replace("?", r"\?")):
        make_mixer(name, parameters)

"""What strokes say of a slice's classes as a whole, by hand and by loops."""

from __future__ import annotations

import math

import torch

from pclmix.losses.pixel_terms import pixel_terms
from pclmix.losses.whole_slice import (
    Known,
    absent_cross_entropy,
    log_density,
    only_present,
    present_classes,
)

IGNORE = -1


def test_present_classes() -> None:
    strokes = torch.tensor([[[0, -1], [2, -1]], [[-1, -1], [-1, -1]], [[1, 1], [1, 1]]])
    assert present_classes(strokes, 3).tolist() == [[True, False, True], [True] * 3, [False, True, False]]


def test_absent_by_hand() -> None:
    """Three open pixels whose absent class has 0.2, 0.5 and 0.0; two drawn ones divide."""
    p = torch.tensor([[0.5, 0.2, 0.3], [0.25, 0.5, 0.25], [1.0, 1e-30, 1e-30], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]])
    logits = p.log().T[None, :, None]  # (1, 3, 1, 5)
    label = torch.tensor([[[IGNORE, IGNORE, IGNORE, 0, 2]]])
    present = torch.tensor([True, False, True])[None, :, None, None].expand_as(logits)
    wanted = -(math.log(0.8) + math.log(0.5) + math.log(1.0)) / 2
    torch.testing.assert_close(absent_cross_entropy(logits, label, present), torch.tensor(wanted))


def test_absent_is_nothing_where_every_class_is_there() -> None:
    logits = torch.randn(2, 4, 3, 3, requires_grad=True)
    loss = absent_cross_entropy(logits, torch.full((2, 3, 3), IGNORE), torch.ones(2, 4, 3, 3, dtype=torch.bool))
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(float(loss.detach())) < 1e-5
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-6


def test_absent_pulls_only_from_absent_classes() -> None:
    logits = torch.zeros(1, 3, 1, 1, requires_grad=True)
    present = torch.tensor([True, True, False])[None, :, None, None]
    absent_cross_entropy(logits, torch.tensor([[[IGNORE]]]), present).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    # p - p(. | present) = 1/3 - 1/2, 1/3 - 1/2, 1/3
    torch.testing.assert_close(logits.grad.flatten(), torch.tensor([-1 / 6, -1 / 6, 1 / 3]))


def test_only_present_by_hand() -> None:
    p = torch.tensor([0.2, 0.5, 0.3])[None, :, None, None]
    kept = only_present(p, torch.tensor([[True, False, True]]))
    torch.testing.assert_close(kept.flatten(), torch.tensor([0.4, 0.0, 0.6]))


def test_log_density_by_hand() -> None:
    """Class 0: 1 of 1 + 1.0 pixels; class 1: 1 of 1 + 3.0; class 2 is not drawn; the last pixel is far away."""
    label = torch.tensor([[[0, 1, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, 0]]])
    open_pixels = [[0.25, 0.75, 0.0]] * 4 + [[0.0, 0.0, 1.0]]
    q = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], *open_pixels, [1.0, 0, 0]]).T[None, :, None]
    near = torch.tensor([[[True] * 7 + [False]]])
    first, second = math.log(1 / 2), math.log(1 / 4)
    mean = (first + second) / 2
    wanted = torch.tensor([[first - mean, second - mean, 0.0]])
    torch.testing.assert_close(log_density(label, q, near), wanted)


def test_nothing_drawn_has_no_density() -> None:
    label, near = torch.full((1, 2, 2), IGNORE), torch.ones(1, 2, 2, dtype=torch.bool)
    assert log_density(label, torch.full((1, 3, 2, 2), 1 / 3), near).tolist() == [[0.0] * 3]


def test_a_stroke_is_one_of_the_drawn_pixels() -> None:
    """With density d, equation 3 is -log of p_y d_y / sum_k p_k d_k."""
    p, d = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.4])
    logits = p.log()[None, :, None, None].repeat(3, 1, 1, 1)
    label = torch.full((1, 1, 1), 2)
    target = torch.ones(1, 3, 1, 1) / 3
    density = Known(log_density=d.log()[None, :, None, None])
    terms = pixel_terms(logits, logits, [label] * 3, (target, target), 0.4, 0.4, known=[density] * 3)
    each = -math.log(0.2 * 0.4 / (0.5 * 0.1 + 0.3 * 0.2 + 0.2 * 0.4))
    torch.testing.assert_close(terms.sup, torch.tensor(3 * each))
    assert terms.absent is None


def test_absence_is_divided_among_branches_and_added_over_views() -> None:
    torch.manual_seed(0)
    c, t = torch.randn(3, 3, 2, 2), torch.randn(3, 3, 2, 2)
    labels = [torch.tensor([[[0, IGNORE], [IGNORE, 2]]])] * 3
    target = torch.ones(1, 3, 2, 2) / 3
    present = torch.tensor([True, False, True])[None, :, None, None].expand(1, 3, 2, 2)
    terms = pixel_terms(c, t, labels, (target, target), 0.3, 0.4, known=[Known(present=present)] * 3)
    wanted = sum(
        share * absent_cross_entropy(view, label, present)
        for branch, share in ((c, 0.7), (t, 0.3))
        for view, label in zip(branch.chunk(3), labels, strict=True)
    )
    assert terms.absent is not None
    torch.testing.assert_close(terms.absent, wanted)

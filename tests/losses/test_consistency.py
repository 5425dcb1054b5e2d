from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.losses.consistency import Axis, con, heterogeneous, mixed, negative_cosine
from pclmix.losses.total import total


def probabilities(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).softmax(1)


def test_heterogeneous_by_hand() -> None:
    c = [torch.tensor([0.5, 0.5]).view(1, 2, 1, 1), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)]
    t = [torch.tensor([0.2, 0.8]).view(1, 2, 1, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)]
    assert float(heterogeneous(c, t)) == pytest.approx(0.09 + 1.0)


def test_heterogeneous_reaches_both_branches() -> None:
    c, t = (probabilities(2, 3, 4, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: heterogeneous([a, a], [b, b]), (c, t))
    heterogeneous([c], [t]).backward()
    assert c.grad is not None
    assert t.grad is not None
    torch.testing.assert_close(c.grad, -t.grad)


def test_negative_cosine_by_hand() -> None:
    # Two pixels: (1, 0) against (0.6, 0.4), (0.5, 0.5) against (0.5, 0.5).
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).T[None, :, None, :]
    q = torch.tensor([[0.6, 0.4], [0.5, 0.5]]).T[None, :, None, :]
    image = (0.6 + 0.5) / math.sqrt(1.5 * (0.52 + 0.5))
    pixel = (0.6 / math.sqrt(0.52) + 1.0) / 2
    assert float(negative_cosine(p, q)) == pytest.approx(-image)
    assert float(negative_cosine(p, q, axis="pixel")) == pytest.approx(-pixel)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_negative_cosine_equals_torch(layout: torch.memory_format) -> None:
    p, q = (probabilities(3, 4, 5, 6).contiguous(memory_format=layout) for _ in range(2))
    torch.testing.assert_close(negative_cosine(p, q), -F.cosine_similarity(p.flatten(1), q.flatten(1)).mean())
    torch.testing.assert_close(negative_cosine(p, q, "pixel"), -F.cosine_similarity(p, q, dim=1).mean())


@pytest.mark.parametrize("axis", ["image", "pixel"])
def test_negative_cosine_leaves_erased_pixels_out(axis: Axis) -> None:
    p, q = probabilities(2, 3, 4, 4), probabilities(2, 3, 4, 4).requires_grad_()
    p[:, :, :2] = 0
    loss = negative_cosine(p, q, axis)
    torch.testing.assert_close(loss, negative_cosine(p[:, :, 2:], q[:, :, 2:], axis))
    (gradient,) = torch.autograd.grad(loss, q)
    assert not gradient[:, :, :2].any()
    nothing = negative_cosine(torch.zeros_like(p), q, axis)
    (gradient,) = torch.autograd.grad(nothing, q)
    assert float(nothing.detach()) == 0
    assert not gradient.any()


@pytest.mark.parametrize("axis", ["image", "pixel"])
def test_negative_cosine_gradient(axis: Axis) -> None:
    p = probabilities(2, 3, 2, 2, dtype=torch.float64).requires_grad_()
    q = probabilities(2, 3, 2, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: negative_cosine(p, x, axis), q)
    negative_cosine(p, q, axis).backward()
    assert p.grad is None, "the target must be detached"


def test_mixed_by_hand() -> None:
    def pixel(*p: float) -> Tensor:
        return torch.tensor(p).view(1, 2, 1, 1)

    first = 0.6 / math.sqrt(0.52)
    second = (0.2 * 0.7 + 0.8 * 0.3) / math.sqrt(0.68 * 0.58)
    loss = mixed(pixel(1.0, 0.0), pixel(0.6, 0.4), pixel(0.2, 0.8), pixel(0.7, 0.3))
    assert float(loss) == pytest.approx(-first - second)


def test_mixed_is_least_where_mixing_commutes() -> None:
    p, q = probabilities(2, 3, 4, 4), probabilities(2, 3, 4, 4)
    assert float(mixed(p, p, q, q)) == pytest.approx(-2)
    assert float(mixed(p, q, q, p)) > -2


def test_con_by_hand() -> None:
    assert float(con(torch.tensor(2.0), torch.tensor(-1.5))) == 0.5
    assert float(con(torch.tensor(2.0), torch.tensor(-1.5), lambda_mix=2.0)) == -1


def test_total_by_hand() -> None:
    assert float(total(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0))) == pytest.approx(1 + 0.15 * 2 + 3)
    loss = total(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0), lambda_ctr=0.5, lambda_con=0.0)
    assert float(loss) == pytest.approx(2.0)


def test_consistency_is_computed_in_float32() -> None:
    p, q = probabilities(2, 3, 4, 4).bfloat16(), probabilities(2, 3, 4, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        losses = heterogeneous([p], [q]), negative_cosine(p, q), negative_cosine(p, q, "pixel")
    references = heterogeneous([p.float()], [q.float()]), negative_cosine(p.float(), q.float()), None
    assert all(loss.dtype == torch.float32 for loss in losses)
    assert torch.equal(losses[0], references[0])
    assert torch.equal(losses[1], references[1])

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.losses.unlabelled import confident_mse, follow, heterogeneous, mixed, negative_cosine


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
    assert float(negative_cosine(p, q)) == pytest.approx(-(0.6 + 0.5) / math.sqrt(1.5 * (0.52 + 0.5)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_negative_cosine_equals_torch(layout: torch.memory_format) -> None:
    p, q = (probabilities(3, 4, 5, 6).contiguous(memory_format=layout) for _ in range(2))
    torch.testing.assert_close(negative_cosine(p, q), -F.cosine_similarity(p.flatten(1), q.flatten(1)).mean())


def test_negative_cosine_leaves_erased_pixels_out() -> None:
    p, q = probabilities(2, 3, 4, 4), probabilities(2, 3, 4, 4).requires_grad_()
    p[:, :, :2] = 0
    loss = negative_cosine(p, q)
    torch.testing.assert_close(loss, negative_cosine(p[:, :, 2:], q[:, :, 2:]))
    (gradient,) = torch.autograd.grad(loss, q)
    assert not gradient[:, :, :2].any()
    nothing = negative_cosine(torch.zeros_like(p), q)
    (gradient,) = torch.autograd.grad(nothing, q)
    assert float(nothing.detach()) == 0
    assert not gradient.any()


def test_negative_cosine_gradient() -> None:
    p = probabilities(2, 3, 2, 2, dtype=torch.float64).requires_grad_()
    q = probabilities(2, 3, 2, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: negative_cosine(p, x), q)
    negative_cosine(p, q).backward()
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


def test_consistency_is_computed_in_float32() -> None:
    p, q = probabilities(2, 3, 4, 4).bfloat16(), probabilities(2, 3, 4, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        losses = heterogeneous([p], [q]), negative_cosine(p, q)
    references = heterogeneous([p.float()], [q.float()]), negative_cosine(p.float(), q.float())
    assert all(loss.dtype == torch.float32 for loss in losses)
    assert torch.equal(losses[0], references[0])
    assert torch.equal(losses[1], references[1])


def test_confident_mse_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).T[None, :, None, :]
    target = torch.tensor([[1.0, 0.0], [0.3, 0.7]]).T[None, :, None, :]
    uncertainty = torch.tensor([[[0.1, 0.9]]])
    # Only the first pixel is sure: (0.5^2 + 0.5^2) / 2.
    assert float(confident_mse(p, target, uncertainty, torch.tensor(0.5))) == pytest.approx(0.25)
    assert float(confident_mse(p, target, uncertainty, torch.tensor(1.0))) == pytest.approx((0.25 + 0.01) / 2)
    assert float(confident_mse(p, target, uncertainty, torch.tensor(0.0))) == 0


def test_confident_mse_detaches_its_target() -> None:
    p, target = (torch.rand(1, 2, 3, 3, requires_grad=True) for _ in range(2))
    confident_mse(p, target, torch.zeros(1, 3, 3), torch.tensor(1.0)).backward()
    assert p.grad is not None
    assert target.grad is None


def test_follow_copies_first_then_averages() -> None:
    teacher, student = [torch.zeros(3), torch.zeros(2, 2)], [torch.ones(3), torch.full((2, 2), 4.0)]
    updates = torch.zeros((), dtype=torch.int64)
    follow(teacher, student, updates, 0.99)
    assert [t.tolist() for t in teacher] == [s.tolist() for s in student]
    expected, weights = 1.0, [2.0, -1.0, 0.5]
    for n, value in enumerate(weights, start=1):
        student[0].fill_(value)
        follow(teacher, student, updates, 0.7)
        decay = min(0.7, 1 - 1 / (n + 1))
        expected = decay * expected + (1 - decay) * value
        torch.testing.assert_close(teacher[0], torch.full((3,), expected))
    assert updates == 4

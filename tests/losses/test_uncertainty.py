from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pclmix.labels import IGNORE
from pclmix.losses.unlabelled import entropy, entropy_threshold, mean_prediction, pseudo_label, ramp


def test_mean_prediction_by_hand() -> None:
    q = mean_prediction(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(q, torch.tensor([0.3, 0.7]))
    assert mean_prediction(torch.ones(2).bfloat16(), torch.ones(2).bfloat16()).dtype == torch.float32


def test_mean_prediction_gradient() -> None:
    p = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: mean_prediction(a, b, 0.4), (p, p.detach().clone().requires_grad_()))


def test_entropy_by_hand() -> None:
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]).T[None, :, None, :]
    expected = [math.log(2), 0.0, -0.25 * math.log(0.25) - 0.75 * math.log(0.75)]
    assert entropy(q)[0, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_entropy_epsilon_stands_inside_the_logarithm() -> None:
    q = torch.tensor([0.5, 0.5], dtype=torch.float64).view(1, 2, 1, 1)
    assert float(entropy(q, epsilon=0.1)) == pytest.approx(-math.log(0.6))


def test_entropy_gradient() -> None:
    q = torch.rand(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entropy, q)


def test_ramp_by_hand() -> None:
    for t in (0.0, 0.3, 1.0):
        assert float(ramp(torch.tensor(t))) == pytest.approx(math.exp(-5 * (1 - t) ** 2))
    assert float(ramp(torch.tensor(0.25), 0.5)) == pytest.approx(math.exp(-5 * 0.25))
    assert float(ramp(torch.tensor(0.8), 0.5)) == 1


def test_threshold_by_hand() -> None:
    for t in (0.0, 0.3, 1.0):
        expected = (0.75 + 0.25 * math.exp(-5 * (1 - t) ** 2)) * math.log(2)
        assert float(entropy_threshold(torch.tensor(t))) == pytest.approx(expected)
    assert float(entropy_threshold(torch.tensor(1.0))) == pytest.approx(math.log(2))


def test_pseudo_label_by_hand() -> None:
    q = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5], [0.6, 0.4]]).T[None, :, None, :]
    label = torch.tensor([[[1, IGNORE, IGNORE, 0]]])
    # The scribble against the prediction; sure; not sure; not sure, but drawn.
    assert pseudo_label(q, label, torch.tensor(0.5)).tolist() == [[[1, 1, IGNORE, 0]]]


def test_pseudo_label_is_strict_at_the_threshold() -> None:
    q = torch.tensor([0.9, 0.1]).view(1, 2, 1, 1)
    label, u = torch.full((1, 1, 1), IGNORE), entropy(q).squeeze()
    assert int(pseudo_label(q, label, u)) == IGNORE
    assert int(pseudo_label(q, label, u + 1e-4)) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 5), st.integers(1, 5), st.floats(0, 1), st.integers(0, 99))
def test_pseudo_label_equals_the_loop(k: int, h: int, w: int, progress: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(2, k, h, w, generator=g) * 3).softmax(1).requires_grad_()
    label = torch.randint(-1, k, (2, h, w), generator=g).masked_fill(torch.rand(2, h, w, generator=g) < 0.5, IGNORE)
    threshold = entropy_threshold(torch.tensor(progress))
    result = pseudo_label(q, label, threshold)
    assert not result.requires_grad
    for b in range(2):
        for y in range(h):
            for x in range(w):
                p = q[b, :, y, x].tolist()
                u = -sum(v * math.log(v + 1e-6) for v in p)
                if abs(u - float(threshold)) < 1e-5:
                    continue
                drawn = int(label[b, y, x])
                sure = p.index(max(p)) if u < float(threshold) else IGNORE
                assert int(result[b, y, x]) == (drawn if drawn >= 0 else sure)

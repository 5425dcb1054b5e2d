from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pclmix.data.batch import Batch
from pclmix.labels import IGNORE
from pclmix.losses.pseudo import largest_components
from pclmix.methods.base import Task, build_params, sum_terms
from pclmix.methods.cyclemix import CycleMix, disagreement, largest_component_labels
from pclmix.mixing import SaliencyMix, squares


def build(**params: Any) -> CycleMix:
    torch.manual_seed(0)
    return CycleMix(Task("resnet10", 1, 4, (64, 64)), build_params(CycleMix, params)).train()  # type: ignore[arg-type]


def test_squares_lie_inside_and_have_their_size() -> None:
    mask = squares(torch.zeros(20, 1, 48, 40), 32, torch.Generator().manual_seed(0))
    assert mask.sum((1, 2, 3)).tolist() == [32 * 32] * 20
    assert len(mask.flatten(1).unique(dim=0)) > 10
    assert squares(torch.zeros(2, 1, 8, 8), 32, torch.Generator()).all()


def test_disagreement_by_hand() -> None:
    # Two pixels: (1, 0) against (0.6, 0.4), (0.5, 0.5) against itself; a third has no target.
    target = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]).T[None, :, None, :].requires_grad_()
    p = torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.9, 0.1]]).T[None, :, None, :].requires_grad_()
    loss = disagreement(target, p)
    assert float(loss.detach()) == pytest.approx((1 - 0.6 / math.sqrt(0.52)) / 2, abs=1e-6)
    loss.backward()
    assert p.grad is not None
    assert target.grad is not None
    assert p.grad[..., 0].any()
    assert target.grad[..., 0].any()
    assert not p.grad[..., 2].any()
    nothing = disagreement(torch.zeros_like(p), p)
    assert float(nothing.detach()) == 0


def test_disagreement_equals_torch_and_its_gradient() -> None:
    p, q = (torch.randn(2, 3, 4, 5, dtype=torch.float64).softmax(1).requires_grad_() for _ in range(2))
    torch.testing.assert_close(disagreement(p, q), 1 - F.cosine_similarity(p, q, dim=1).mean())
    assert torch.autograd.gradcheck(disagreement, (p, q))


def test_largest_component_labels_by_hand() -> None:
    # Class 1 on the first two pixels and, as an island, on the last.
    p = torch.tensor([[[0.1, 0.2, 0.8, 0.3]], [[0.9, 0.8, 0.2, 0.7]]])[None]
    assert largest_component_labels(p).tolist() == [[[[0, 0, 1, 1]], [[1, 1, 0, 0]]]]


def test_the_step_by_hand(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(occlusion=16), batch_for(CycleMix, 0, 3)
    twin = deepcopy(method)
    terms = method.step(batch, torch.full((), 0.5), torch.Generator().manual_seed(3))
    assert batch.image.grad is None
    assert not batch.image.requires_grad

    g, y = torch.Generator().manual_seed(3), batch.label
    x = batch.image.clone().requires_grad_()
    logits = twin.net(x)
    pce = F.cross_entropy(logits, y, ignore_index=IGNORE)
    (gradient,) = torch.autograd.grad(pce, x, retain_graph=True)
    saliency, x = gradient.abs()[:, 0], x.detach()  # one channel: its square's root is its size
    order = torch.randperm(3, generator=g)
    mask = SaliencyMix(area=0.5).draw(x, x[order], g, (saliency, saliency[order])).mask
    hidden = squares(x, 16, g)
    turns = torch.randint(0, 4, (3,), generator=g).tolist()
    p = logits.softmax(1)
    image = torch.where(mask, x, x[order]).masked_fill(hidden, 0)
    label = torch.where(mask[:, 0], y, y[order]).masked_fill(hidden[:, 0], IGNORE)
    target = torch.where(mask, p, p[order]).masked_fill(hidden, 0)
    image, label, target = (
        torch.stack([torch.rot90(one, turn, (-2, -1)) for one, turn in zip(maps, turns, strict=True)])
        for maps in (image, label, target)
    )
    mixed = twin.net(image)
    known = target.sum(1) > 0
    assert known.float().mean() == pytest.approx(1 - 16 * 16 / 64**2)
    one_hot = F.one_hot(largest_components(p.argmax(1), 4), 4).permute(0, 3, 1, 2)
    expected = {
        "pce": pce,
        "mix_pce": F.cross_entropy(mixed, label, ignore_index=IGNORE),
        "mix": (1 - F.cosine_similarity(target, mixed.softmax(1), dim=1))[known].mean(),
        "component": 1 - F.cosine_similarity(one_hot, p, dim=1).mean(),
    }
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(terms[name].value, value, rtol=1e-4, atol=1e-5)
    assert [float(term.weight) for term in terms.values()] == [1, 1, 7, 7]
    # Gradients as well; the gradient at the image has left none behind.
    sum_terms(terms).backward()  # type: ignore[no-untyped-call]
    (expected["pce"] + expected["mix_pce"] + 7 * (expected["mix"] + expected["component"])).backward()
    for (name, ours), theirs in zip(method.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert float((ours.grad - theirs.grad).abs().max()) < 2e-2 * float(theirs.grad.abs().max()) + 1e-4, name


def test_consistencies_rise(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(), batch_for(CycleMix)
    for progress, weight in ((0.0, 0.0), (0.1, 3.5), (0.2, 7.0), (1.0, 7.0)):
        terms = method.step(batch, torch.full((), progress), torch.Generator().manual_seed(0))
        assert [float(term.weight) for term in terms.values()] == pytest.approx([1, 1, weight, weight])


def test_fully_occluded_images_have_no_mix_loss(batch_for: Callable[..., Batch]) -> None:
    terms = build(occlusion=64).step(batch_for(CycleMix), torch.zeros(()), torch.Generator().manual_seed(0))
    assert float(terms["mix_pce"].value.detach()) == 0
    assert float(terms["mix"].value.detach()) == 0

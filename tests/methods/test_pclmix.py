"""PCLMix's step against the paper, computed by hand; its options."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from pclmix.data.batch import Batch
from pclmix.losses.contrast import info_nce, prototypes, sample_anchors
from pclmix.methods.base import Task, Terms, build_params, find_method, sum_terms
from pclmix.methods.pclmix import PCLMix, consistency, objective
from pclmix.mixing import rectangles

LAMBDA_T, ANCHORS = 0.3, 32
MakeBatch = Callable[..., Batch]


def build(**params: Any) -> PCLMix:
    torch.manual_seed(0)
    method = find_method("pclmix")
    small = {"anchors": ANCHORS, "queue": 8, "embedding": 16, "lambda_t": LAMBDA_T, "swin_width": 24}
    built = method(Task("resnet10", 1, 4, (64, 64)), build_params(method, {**small, **params}))
    assert isinstance(built, PCLMix)
    return built.train()


def step(method: PCLMix, batch: Batch, progress: float = 0.5, seed: int = 1) -> Terms:
    return method.step(batch, torch.full((), progress), torch.Generator().manual_seed(seed))


def cross_entropy(p: Tensor, y: Tensor) -> Tensor:
    """Mean of -log p_y over the scribbled pixels."""
    drawn = (y >= 0).nonzero()
    return torch.stack([-p[b, y[b, i, j], i, j].log() for b, i, j in drawn.tolist()]).mean()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Per image over all classes and pixels, then the mean."""
    pairs = zip(a.flatten(1), b.flatten(1), strict=True)
    return torch.stack([(u @ v) / (u.norm() * v.norm()) for u, v in pairs]).mean()


def by_hand(method: PCLMix, batch: Batch, progress: float, seed: int) -> dict[str, Tensor]:
    """The equations in the order of the paper, with the random draws of one seed."""
    g = torch.Generator().manual_seed(seed)
    x, y = batch.image, batch.label
    one, two = (torch.randperm(len(x), generator=g) for _ in range(2))
    inside = rectangles(x, 0.2, g)
    m = inside.float()
    x12, x21 = m * x[one] + (1 - m) * x[two], m * x[two] + (1 - m) * x[one]
    y12, y21 = (torch.where(inside[:, 0], a, b) for a, b in ((y[one], y[two]), (y[two], y[one])))

    features = method.net.features(torch.cat([x, x12, x21]))
    pc, pc12, pc21 = method.net.decode(features).softmax(1).chunk(3)
    pt, pt12, pt21 = method.aux(features).softmax(1).chunk(3)
    stride8 = features[method.net.encoder.strides.index(8)][: len(x)]
    embedding = method.head(stride8)

    branches = [(pc, pt, y), (pc12, pt12, y12), (pc21, pt21, y21)]
    sup = sum((1 - LAMBDA_T) * cross_entropy(c, v) + LAMBDA_T * cross_entropy(t, v) for c, t, v in branches)
    het = sum((c - t).square().mean() for c, t, _ in branches)
    q12, q21 = ((1 - LAMBDA_T) * c + LAMBDA_T * t for c, t, _ in branches[1:])
    p1, p2 = pc.detach()[one], pt.detach()[two]
    mix = -cosine(m * p1 + (1 - m) * p2, q12) - cosine(m * p2 + (1 - m) * p1, q21)

    q = ((1 - LAMBDA_T) * pc + LAMBDA_T * pt).detach()
    u = -(q * (q + 1e-6).log()).sum(1)
    h = (0.75 + 0.25 * torch.exp(torch.tensor(-5 * (1 - progress) ** 2))) * torch.log(torch.tensor(2.0))
    pseudo = torch.where(y >= 0, y, torch.where(u < h, q.argmax(1), -1))[:, ::8, ::8]
    anchors = sample_anchors(pseudo, pc.argmax(1)[:, ::8, ::8], ANCHORS, g)
    picked = embedding.permute(0, 2, 3, 1).flatten(0, 2)[anchors.index]
    queue = method.queue
    ctr = info_nce(picked, anchors.label, anchors.valid, queue.entries.clone(), queue.filled)
    queue.enqueue(*prototypes(embedding, pseudo, 4))
    assert isinstance(sup, Tensor)
    assert isinstance(het, Tensor)
    return {"sup": sup, "ctr": ctr, "het": het, "mix": mix}


def test_step_equals_the_paper_by_hand(batch_for: MakeBatch) -> None:
    method = build()
    step(method, batch_for(PCLMix, 0, 3))  # so that the queue holds something
    twin, batch = deepcopy(method), batch_for(PCLMix, 1, 3)
    terms, expected = step(method, batch, 0.4, seed=7), by_hand(twin, batch, 0.4, 7)
    assert set(terms) == set(expected)
    assert float(terms["ctr"].value.detach()) > 0
    for name, value in expected.items():
        torch.testing.assert_close(terms[name].value, value, rtol=1e-4, atol=1e-5)
    weights = {name: float(term.weight) for name, term in terms.items()}
    assert weights == pytest.approx({"sup": 1.0, "ctr": 0.15, "het": 1.0, "mix": 1.0})
    torch.testing.assert_close(method.queue.entries, twin.queue.entries, rtol=1e-4, atol=1e-5)
    assert torch.equal(method.queue.count, twin.queue.count)
    # The same gradient, too.
    sum_terms(terms).backward()  # type: ignore[no-untyped-call]
    (expected["sup"] + 0.15 * expected["ctr"] + expected["het"] + expected["mix"]).backward()
    for (name, ours), theirs in zip(method.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        scale = float(theirs.grad.abs().max()) + 1e-4
        assert float((ours.grad - theirs.grad).abs().max()) < 2e-2 * scale, name


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({"lambda_ctr": 0}, {"sup", "het", "mix"}),
        ({"lambda_con": 0}, {"sup", "ctr"}),
        ({"lambda_mix": 0}, {"sup", "ctr", "het"}),
        ({"lambda_het": 0}, {"sup", "ctr", "mix"}),
        ({"lambda_ctr": 0, "lambda_con": 0}, {"sup"}),
    ],
)
def test_weight_zero_removes_the_term(params: dict[str, float], left: set[str], batch_for: MakeBatch) -> None:
    assert set(step(build(**params), batch_for(PCLMix))) == left


def test_supervise_t_false_leaves_the_transformer_to_consistency(batch_for: MakeBatch) -> None:
    batch = batch_for(PCLMix)
    method = build(supervise_t=False)
    terms = step(method, batch)
    terms["sup"].value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert not any(p.grad is not None and p.grad.any() for p in method.aux.parameters())
    sum_terms(terms).backward()  # type: ignore[no-untyped-call]
    assert any(p.grad is not None and p.grad.any() for p in method.aux.parameters())


def test_ramp_scales_all_but_supervision(batch_for: MakeBatch) -> None:
    batch, method = batch_for(PCLMix), build(ramp=0.5)
    for progress, share in ((0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (1.0, 1.0)):
        weights = {name: float(term.weight) for name, term in step(method, batch, progress).items()}
        assert weights == pytest.approx({"sup": 1, "ctr": 0.15 * share, "het": share, "mix": share})


@pytest.mark.parametrize("mixer", ["mixup", "cutout", "saliency"])
def test_step_with_every_mixer(mixer: str, batch_for: MakeBatch) -> None:
    terms = step(build(mixer=mixer), batch_for(PCLMix))
    assert sum_terms(terms).isfinite()


def test_equations_1_and_13_by_hand() -> None:
    sup, ctr, het, mix = (torch.tensor(value) for value in (1.0, 2.0, 3.0, -1.5))
    con = consistency(het, mix, lambda_mix=2.0)
    assert float(sum_terms(con)) == pytest.approx(3 - 2 * 1.5)
    assert float(sum_terms(objective(sup, ctr, con, 0.15, 1.0))) == pytest.approx(1 + 0.15 * 2 + 3 - 3)
    assert float(sum_terms(objective(sup, ctr, con, 0.15, 0.5, rise=0.1))) == pytest.approx(1 + 0.1 * 0.15 * 2)
    assert set(objective(sup, None, con, 0.15, 0.0)) == {"sup"}

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F

from pclmix.data.batch import Batch
from pclmix.methods.base import Task, build_params, sum_terms
from pclmix.methods.trimix import TriMix
from pclmix.mixing import rectangles


def build() -> TriMix:
    torch.manual_seed(0)
    # Without dropout, whose draws a second computation could not repeat.
    method = TriMix(Task("resnet10", 1, 4, (64, 64)), build_params(TriMix, {}))  # type: ignore[arg-type]
    return method.train()


def test_the_step_by_hand(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(), batch_for(TriMix, 0, 3)
    twin = deepcopy(method)
    terms = method.step(batch, torch.zeros(()), torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(3)
    orders = [torch.randperm(3, generator=g) for _ in range(3)]
    x, y = [batch.image[o] for o in orders], [batch.label[o] for o in orders]
    others = [(1, 2), (2, 0), (0, 1)]
    masks = [rectangles(x[0], 0.2, g) for _ in others]
    nets = (twin.net, twin.net2, twin.net3)
    logits = []
    for net, m, own, (j, k) in zip(nets, masks, x, others, strict=True):
        logits.append(net(torch.cat([own, torch.where(m, x[j], x[k])])))
    p = [z[:3].softmax(1) for z in logits]
    pce = sum(F.cross_entropy(z[:3], v, ignore_index=-1) for z, v in zip(logits, y, strict=True))
    mix = pseudo = torch.zeros(())
    for z, m, (j, k) in zip(logits, masks, others, strict=True):
        mix = mix + F.cross_entropy(z[3:], torch.where(m[:, 0], y[j], y[k]), ignore_index=-1)
        pseudo = pseudo + F.cross_entropy(z[3:], torch.where(m, p[j], p[k]).argmax(1))
    for name, value in {"pce": pce, "mix": mix, "pseudo": pseudo}.items():
        torch.testing.assert_close(terms[name].value, value, rtol=1e-4, atol=1e-5)


def test_trains_three_different_networks(batch_for: Callable[..., Batch]) -> None:
    method = build()
    weights = [next(method.get_submodule(name).parameters()) for name in method.inference_nets]
    assert len({float(w.detach().sum()) for w in weights}) == 3
    sum_terms(method.step(batch_for(TriMix), torch.zeros(()), torch.Generator())).backward()  # type: ignore[no-untyped-call]
    assert all(w.grad is not None and w.grad.any() for w in weights)

"""Nothing in the losses or in mixing waits for a value: a whole step can be one captured graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from pclmix.losses.consistency import con, heterogeneous, mixed
from pclmix.losses.contrast import at_stride, info_nce, prototypes, sample_anchors
from pclmix.losses.partial_ce import supervised
from pclmix.losses.queue import PrototypeQueue
from pclmix.losses.total import total
from pclmix.losses.uncertainty import entropy_threshold, mean_prediction, pseudo_label
from pclmix.mixing import MIXERS, Mixer, make_mixer

B, K, SIDE, D, N, Q = 4, 3, 64, 8, 32, 6


class Step:
    """All equations once, on tensors that stand in for a network's outputs."""

    def __init__(self, mixer: Mixer, device: str, axis: str = "image") -> None:
        self.mixer, self.axis = mixer, axis
        g = torch.Generator().manual_seed(0)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(device)

        self.x, self.y = rand(B, 1, SIDE, SIDE), torch.randint(-1, K, (B, SIDE, SIDE), generator=g).to(device)
        self.logits_c, self.logits_t = rand(3 * B, K, SIDE, SIDE).bfloat16(), rand(3 * B, K, SIDE, SIDE)
        self.embedding = rand(B, D, SIDE // 8, SIDE // 8)
        self.leaves = [self.logits_c, self.logits_t, self.embedding]
        for leaf in self.leaves:
            leaf.requires_grad_().grad = torch.zeros_like(leaf)
        self.queue = PrototypeQueue(K, D, Q).to(device)
        self.progress = torch.full((), 0.5, device=device)
        self.generator = torch.Generator(device).manual_seed(1)

    def __call__(self) -> Tensor:
        g, device = self.generator, self.x.device
        for leaf in self.leaves:
            leaf.grad.zero_()
        one, two = (torch.rand(B, generator=g, device=device).argsort() for _ in range(2))
        mix = self.mixer.draw(self.x[one], self.x[two], g)
        mix.images(self.x[one], self.x[two])
        y12, y21 = mix.labels(self.y[one], self.y[two]), mix.labels(self.y[two], self.y[one])
        sup = supervised(self.logits_c.chunk(3), self.logits_t.chunk(3), (self.y, y12, y21))
        p_c, p_t = self.logits_c.float().softmax(1).chunk(3), self.logits_t.softmax(1).chunk(3)
        q, q12, q21 = (mean_prediction(c, t) for c, t in zip(p_c, p_t, strict=True))
        p1, p2 = p_c[0][one], p_t[0][two]
        mixing = mixed(mix.predictions(p1, p2), q12, mix.predictions(p2, p1), q21, self.axis)
        pseudo = pseudo_label(at_stride(q), at_stride(self.y), entropy_threshold(self.progress))
        anchors = sample_anchors(pseudo, at_stride(p_c[0]).argmax(1), N, g)
        rows = anchors.pick(self.embedding)
        ctr = info_nce(rows, anchors.label, anchors.valid, self.queue.entries, self.queue.filled)
        self.queue.enqueue(*prototypes(self.embedding, pseudo, K))
        loss = total(sup, ctr, con(heterogeneous(p_c, p_t), mixing))
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("axis", ["image", "pixel"])
@pytest.mark.parametrize("name", MIXERS.names())
def test_a_step_never_waits(name: str, axis: str, no_sync: Callable[[], AbstractContextManager[Any]]) -> None:
    step = Step(make_mixer(name), "cpu", axis)
    with no_sync():
        losses = [step() for _ in range(2)]
    assert all(loss.isfinite() for loss in losses)
    assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in step.leaves)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.tensor(1.0),
        lambda x: x.index_put_((x > 0,), x.sum()),
    ],
)
def test_the_check_sees_what_waits(
    wait: Callable[[Tensor], Any], no_sync: Callable[[], AbstractContextManager[Any]]
) -> None:
    x = torch.randn(5)
    with no_sync(), pytest.raises(AssertionError):
        wait(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("axis", ["image", "pixel"])
@pytest.mark.parametrize("name", MIXERS.names())
def test_a_step_is_one_graph(name: str, axis: str) -> None:
    captured, eager = Step(make_mixer(name), "cuda", axis), Step(make_mixer(name), "cuda", axis)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured(), eager()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(captured.generator)
    with torch.cuda.graph(graph, stream=stream):
        loss = captured()
    # Capturing runs nothing, so the first replay is the second step.
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(loss, eager(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(captured.queue.entries, eager.queue.entries)
        torch.testing.assert_close(captured.embedding.grad, eager.embedding.grad, rtol=1e-3, atol=1e-5)

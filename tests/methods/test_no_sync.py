"""A PCLMix step never waits for the device, with any mixer, and can be captured as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from pclmix.data.batch import Batch
from pclmix.methods.base import Task, build_params, sum_terms
from pclmix.methods.pclmix import PCLMix
from pclmix.mixing import MIXERS

SMALL = {"anchors": 32, "queue": 8, "embedding": 16, "swin_width": 24}


class Step:
    """A whole step with its gradients, on fixed buffers."""

    def __init__(self, mixer: str, batch: Batch, device: str) -> None:
        torch.manual_seed(0)
        params = build_params(PCLMix, SMALL | {"mixer": mixer})
        self.method = PCLMix(Task("resnet10", 1, 4, (64, 64)), params).to(device).train()  # type: ignore[arg-type]
        index = batch.index.to(device)
        self.batch = Batch(batch.image.to(device), batch.label.to(device), index, {}, None)
        self.progress = torch.full((), 0.5, device=device)
        self.generator = torch.Generator(device).manual_seed(1)
        for parameter in self.method.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self) -> Tensor:
        for parameter in self.method.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        loss = sum_terms(self.method.step(self.batch, self.progress, self.generator))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@pytest.mark.parametrize("name", MIXERS.names())
def test_step_never_waits_for_the_device(
    name: str, batch_for: Callable[..., Batch], no_sync: Callable[[], AbstractContextManager[Any]]
) -> None:
    step = Step(name, batch_for(PCLMix), "cpu")
    with no_sync():
        losses = [step() for _ in range(2)]
    assert all(loss.isfinite() for loss in losses)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in step.method.parameters())


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
def test_no_sync_finds_waiting_operations(
    wait: Callable[[Tensor], Any], no_sync: Callable[[], AbstractContextManager[Any]]
) -> None:
    x = torch.randn(5)
    with no_sync(), pytest.raises(AssertionError):
        wait(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MIXERS.names())
def test_step_is_captured_as_one_graph(name: str, batch_for: Callable[..., Batch]) -> None:
    batch = batch_for(PCLMix)
    captured, eager = Step(name, batch, "cuda"), Step(name, batch, "cuda")
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
        torch.testing.assert_close(captured.method.queue.entries, eager.method.queue.entries, rtol=1e-4, atol=1e-4)
        weights = [step.method.head.project[0].weight.grad for step in (captured, eager)]
        torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)

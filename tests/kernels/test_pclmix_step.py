"""A whole PCLMix step with kernels against plain torch: every operation takes part."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from interpreter import interpreted
from torch import Tensor

from pclmix import kernels
from pclmix.data.batch import Batch
from pclmix.methods.base import Task, build_params, sum_terms
from pclmix.methods.pclmix import PCLMix
from pclmix.training.step import cast_weights

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
#: Autograd functions of the kernels.
FUNCTIONS = {
    "_BatchNormAct",
    "_Fork",
    "_Linear",
    "_PixelTerms",
    "_PlaceLogits",
    "_ResidualNorm",
    "_SquaredNorms",
    "_UpsampleConcat",
    "_WindowAttention",
}


def nodes(output: Tensor) -> set[str]:
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return {node.name().removesuffix("Backward") for node in seen}


def run(
    method: PCLMix, batch: Batch, mode: AbstractContextManager[None], bf16: bool
) -> tuple[dict[str, float], list[Tensor], set[str]]:
    """Values of the terms, gradients, and the autograd functions of one step from the same state."""
    state = {name: value.clone() for name, value in method.state_dict().items()}
    method.zero_grad()
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=bf16, cache_enabled=False)
    with mode, autocast, cast_weights(method, torch.bfloat16) if bf16 else nullcontext():
        terms = method.step(batch, torch.full((), 0.5, device=DEVICE), torch.Generator(DEVICE).manual_seed(3))
        loss = sum_terms(terms)
        functions = nodes(loss)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in method.parameters() if p.grad is not None]
    method.load_state_dict(state)
    return {name: float(term.value.detach()) for name, term in terms.items()}, gradients, functions


def build(net: str, size: int) -> tuple[PCLMix, Batch]:
    torch.manual_seed(0)
    params = build_params(PCLMix, {"anchors": 16, "queue": 8, "embedding": 16})
    method = PCLMix(Task(net, 1, 4, (size, size)), params)  # type: ignore[arg-type]
    method = method.to(DEVICE, memory_format=torch.channels_last).train()
    image = torch.rand(2, 1, size, size).contiguous(memory_format=torch.channels_last)
    label = torch.randint(-40, 4, (2, size, size)).clamp(min=-1)
    batch = Batch(image.to(DEVICE), label.to(DEVICE), torch.arange(2, device=DEVICE))
    method.queue.enqueue(torch.randn(4, 4, 16, device=DEVICE), torch.ones(4, 4, device=DEVICE) > 0)
    return method, batch


@pytest.mark.skipif(CUDA, reason="on a GPU the step is in bf16: the next test")
def test_a_step_in_the_interpreter_equals_plain_torch() -> None:
    pytest.importorskip("triton")
    method, batch = build("resnet10", 32)
    values, gradients, functions = run(method, batch, interpreted(), bf16=False)
    wanted, exact, plain_functions = run(method, batch, nullcontext(), bf16=False)
    assert functions >= FUNCTIONS
    assert not plain_functions & FUNCTIONS
    assert values == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for a, b in zip(gradients, exact, strict=True):
        assert float((a - b).norm()) <= 1e-2 * float(b.norm()) + 1e-5


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_bf16_step_with_kernels_is_as_accurate_as_plain_torch() -> None:
    """Against float32, values and gradients are no further off with kernels."""
    method, batch = build("resnet50", 128)
    _, exact, _ = run(method, batch, kernels.plain(), bf16=False)
    _, fused, functions = run(method, batch, nullcontext(), bf16=True)
    _, usual, _ = run(method, batch, kernels.plain(), bf16=True)
    assert functions >= FUNCTIONS
    errors = [
        torch.stack([(a - b).norm() / (b.norm() + 1e-12) for a, b in zip(given, exact, strict=True)])
        for given in (fused, usual)
    ]
    assert errors[0].median() < 1.25 * errors[1].median()

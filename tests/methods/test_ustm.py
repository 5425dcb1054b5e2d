from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from pclmix.data.batch import Batch
from pclmix.methods.base import Task, build_params, sum_terms
from pclmix.methods.ustm import USTM, draw_turns, turn


def build(**params: float) -> USTM:
    torch.manual_seed(0)
    built = USTM(Task("unet", 1, 4, (64, 64)), build_params(USTM, {"views": 2, **params}))  # type: ignore[arg-type]
    return built.train()


def weight(method: USTM, batch: Batch, progress: float) -> float:
    terms = method.step(batch, torch.full((), progress), torch.Generator().manual_seed(0))
    return float(terms["consistency"].weight)


def test_consistency_starts_with_the_first_teacher_update(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(), batch_for(USTM)
    with torch.no_grad():
        for parameter in method.net.parameters():  # as if pretrained weights had come in
            parameter.add_(1.0)
    assert weight(method, batch, 0.3) == 0
    method.update(torch.zeros(()))
    for ours, theirs in zip(method.teacher.parameters(), method.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert weight(method, batch, 0.3) == pytest.approx(math.exp(-5 * 0.7**2))
    assert weight(method, batch, 1.0) == 1


def test_teacher_has_no_gradient_and_undoes_turns(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(noise=0.0), batch_for(USTM)
    method.update(torch.zeros(()))
    sum_terms(method.step(batch, torch.ones(()), torch.Generator().manual_seed(0))).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in method.teacher.parameters())
    # A teacher that answers with the image itself must have its turns undone.
    method.teacher = torch.nn.Identity()  # type: ignore[assignment]
    image = torch.rand(6, 4, 64, 64)
    torch.testing.assert_close(method._teach(image, torch.Generator().manual_seed(0)), image.softmax(1))


@pytest.mark.parametrize("size", [(5, 5), (4, 6)])
def test_turn_and_turn_back(size: tuple[int, int]) -> None:
    x = torch.rand(32, 2, *size)
    turns = draw_turns(x, torch.Generator().manual_seed(0))
    assert set(turns.tolist()) == ({0, 1, 2, 3} if size[0] == size[1] else {0, 2})
    turned = turn(x, turns)
    for before, after, quarters in zip(x, turned, turns.tolist(), strict=True):
        assert torch.equal(after, torch.rot90(before, quarters, (1, 2)))
    assert torch.equal(turn(turned, -turns), x)

"""ScribbleVS by hand: a student and a teacher with one answer each, on 2 x 2 pixels of two classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pclmix.data.batch import Batch
from pclmix.labels import IGNORE
from pclmix.methods.base import Task, Terms, build_params, sum_terms
from pclmix.methods.scribblevs import ScribbleVS

#: Probabilities of class 0. Drawn are class 0 on the first pixel and class 1 on the last.
STUDENT = (0.8, 0.3, 0.6, 0.1)
GOOD_TEACHER, BAD_TEACHER = (0.95, 0.9, 0.3, 0.05), (0.7, 0.9, 0.3, 0.2)
DRAWN = torch.tensor([[[0, IGNORE], [IGNORE, 1]]])


class Answer(nn.Module):
    def __init__(self, p: tuple[float, ...]) -> None:
        super().__init__()
        first = torch.tensor(p).view(2, 2)
        self.logits = nn.Parameter(torch.stack([first, 1 - first]).log()[None])

    def forward(self, image: Tensor) -> Tensor:
        return self.logits.expand(len(image), -1, -1, -1)


def terms(teacher: tuple[float, ...], updates: int = 1, progress: float = 1.0) -> Terms:
    params = build_params(ScribbleVS, {"threshold": 0.65})
    method = ScribbleVS(Task("unet", 1, 2, (2, 2)), params).train()  # type: ignore[arg-type]
    method.net, method.teacher = Answer(STUDENT), Answer(teacher)  # type: ignore[assignment]
    method.updates.fill_(updates)
    batch = Batch(torch.zeros(1, 1, 2, 2), DRAWN, torch.tensor([0]))
    return method.step(batch, torch.tensor(progress), torch.Generator())


def by_hand(labels: tuple[int, ...]) -> float:
    """(CE + Dice) / 2 of the student to these labels."""
    known = [(p, k) for p, k in zip(STUDENT, labels, strict=True) if k != IGNORE]
    ce = -sum(math.log(p if k == 0 else 1 - p) for p, k in known) / len(known)
    scores = []
    for c in (0, 1):
        q = [(p if c == 0 else 1 - p, float(k == c)) for p, k in known]
        scores.append(2 * sum(a * g for a, g in q) / sum(a * a + g for a, g in q))
    return (ce + 1 - sum(scores) / 2) / 2


@pytest.mark.parametrize(
    ("teacher", "updates", "labels"),
    [
        (GOOD_TEACHER, 1, (0, 0, 1, 1)),
        (GOOD_TEACHER, 0, (0, 1, IGNORE, 1)),  # before its first update the teacher does not compete
        (BAD_TEACHER, 1, (0, 1, IGNORE, 1)),
    ],
)
def test_pseudo_labels_are_those_of_the_lower_loss(
    teacher: tuple[float, ...], updates: int, labels: tuple[int, ...]
) -> None:
    found = terms(teacher, updates)
    assert float(found["pce"].value.detach()) == pytest.approx(-(math.log(0.8) + math.log(0.9)) / 2, rel=1e-4)
    assert float(found["pseudo"].value.detach()) == pytest.approx(by_hand(labels), rel=1e-4)


def test_the_weight_rises_over_a_fifth_of_training() -> None:
    for progress, weight in ((0.0, math.exp(-5)), (0.1, math.exp(-5 * 0.25)), (0.2, 1.0), (0.9, 1.0)):
        assert float(terms(GOOD_TEACHER, progress=progress)["pseudo"].weight) == pytest.approx(weight)


def test_the_teacher_follows_and_has_no_gradient(batch_for: Callable[..., Batch]) -> None:
    torch.manual_seed(0)
    method = ScribbleVS(Task("resnet10", 1, 4, (64, 64)), build_params(ScribbleVS, {})).train()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in method.net.parameters():  # as if pretrained weights had been loaded
            parameter.add_(1e-2)
    method.update(torch.zeros(()))
    for ours, theirs in zip(method.teacher.parameters(), method.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    loss = sum_terms(method.step(batch_for(ScribbleVS), torch.ones(()), torch.Generator()))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in method.teacher.parameters())
    assert all(p.grad is not None for p in method.net.parameters())

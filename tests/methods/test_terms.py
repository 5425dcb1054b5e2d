"""The losses of the short methods by hand, for a network with a constant output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pclmix.data.batch import Batch
from pclmix.labels import IGNORE
from pclmix.methods.base import Task, Terms, build_params, find_method, sum_terms

#: Probabilities of two classes on 2 x 2 pixels, an image, what was drawn, and a dense map of the same.
P = ((0.8, 0.3), (0.6, 0.1))  # of class 0
IMAGE = ((0.1, 0.2), (0.4, 0.8))
DRAWN = ((0, IGNORE), (IGNORE, 1))
DENSE = ((0, 1), (0, 1))
#: -log of the drawn classes: 0.8 of class 0 and 0.9 of class 1.
PCE = -(math.log(0.8) + math.log(0.9)) / 2
#: -log of 0.8, 0.7, 0.6 and 0.9.
CE = -(math.log(0.8) + math.log(0.7) + math.log(0.6) + math.log(0.9)) / 4
SEED = 1
PIXELS = [(y, x) for y in range(2) for x in range(2)]


class Constant(nn.Module):
    """A network with a constant output."""

    def __init__(self) -> None:
        super().__init__()
        p = torch.tensor(P)
        self.logits = nn.Parameter(torch.stack([p, 1 - p]).log()[None])

    def forward(self, image: Tensor) -> Tensor:
        return self.logits.expand(len(image), -1, -1, -1)


def terms_of(name: str, progress: float = 1.0, **params: Any) -> Terms:
    kind = find_method(name)
    method = kind(Task("unet", 1, 2, (2, 2), 1), build_params(kind, params)).train()
    method.net = Constant()  # type: ignore[assignment]
    if name == "ustm":
        method.teacher = Constant()
        method.updates.fill_(1)  # type: ignore[operator]
    label = torch.tensor(DENSE if name == "full" else DRAWN)[None]
    batch = Batch(torch.tensor(IMAGE)[None, None], label, torch.tensor([0]), {"walker": torch.tensor(DENSE)[None]})
    return method.step(batch, torch.tensor(progress), torch.Generator().manual_seed(SEED))


def classes() -> Iterator[tuple[int, list[float]]]:
    """Each class with its probabilities in the order of PIXELS."""
    for k in (0, 1):
        yield k, [P[y][x] if k == 0 else 1 - P[y][x] for y, x in PIXELS]


def dice(target: tuple[tuple[int, ...], ...]) -> float:
    scores = []
    for k, p in classes():
        g = [float(target[y][x] == k) for y, x in PIXELS]
        scores.append(2 * sum(a * b for a, b in zip(p, g, strict=True)) / (sum(a * a for a in p) + sum(g)))
    return 1 - sum(scores) / 2


def mumford_shah() -> float:
    grey = [IMAGE[y][x] for y, x in PIXELS]
    energy = 0.0
    for _, p in classes():
        mean = sum(a * i for a, i in zip(p, grey, strict=True)) / sum(p)
        energy += sum(a * (i - mean) ** 2 for a, i in zip(p, grey, strict=True))
        energy += abs(p[0] - p[1]) + abs(p[2] - p[3]) + abs(p[0] - p[2]) + abs(p[1] - p[3])
    return energy


def crf() -> float:
    energy = 0.0
    for a in PIXELS:
        for b in (other for other in PIXELS if other != a):
            (i, j), (v, u) = a, b
            near = ((i - v) ** 2 + (j - u) ** 2) / (2 * 6**2)
            alike = (IMAGE[i][j] - IMAGE[v][u]) ** 2 / (2 * 0.1**2)
            same = P[i][j] * P[v][u] + (1 - P[i][j]) * (1 - P[v][u])
            energy += math.exp(-near - alike) * (1 - same)
    return energy / 4


def entropy() -> float:
    return sum(-(p * math.log(p) + (1 - p) * math.log(1 - p)) for row in P for p in row) / (4 * math.log(2))


TOTALS = {
    "pce": lambda: PCE,
    "full": lambda: CE + dice(DENSE),
    "rw": lambda: (CE + dice(DENSE)) / 2,
    "em": lambda: PCE + 0.1 * entropy(),
    "mloss": lambda: PCE + 1e-6 * mumford_shah(),
    "rloss": lambda: PCE + 0.1 * crf(),
}


@pytest.mark.parametrize("name", TOTALS)
def test_the_loss_by_hand(name: str) -> None:
    assert float(sum_terms(terms_of(name)).detach()) == pytest.approx(TOTALS[name](), rel=1e-4)


def test_mloss_energy_without_its_weight() -> None:
    """With a weight of a millionth, a swapped image and prediction would go unnoticed."""
    term = terms_of("mloss")["mumford_shah"]
    assert float(term.value.detach()) == pytest.approx(mumford_shah(), rel=1e-4)
    assert term.weight == 1e-6


def test_s2l_pseudo_labels_by_hand() -> None:
    terms = terms_of("s2l", threshold=0.65, stride=1)
    # Of the two unlabelled pixels, 0.7 of class 1 is confident and 0.6 of class 0 is not.
    assert float(terms["pseudo"].value.detach()) == pytest.approx(-math.log(0.7), rel=1e-4)
    assert float(sum_terms(terms).detach()) == pytest.approx(PCE - 0.5 * math.log(0.7), rel=1e-4)


def test_ustm_consistency_by_hand() -> None:
    turns = int(torch.randint(0, 4, (1,), generator=torch.Generator().manual_seed(SEED)))
    assert turns == 1
    answer = torch.tensor(P).rot90(-turns)  # the teacher saw the image turned; its answer is turned back
    limit = (0.75 + 0.25 * math.exp(-5 * 0.25)) * math.log(2)
    errors = []
    for y, x in PIXELS:
        q = float(answer[y, x])
        if -(q * math.log(q) + (1 - q) * math.log(1 - q)) < limit:
            errors.append((P[y][x] - q) ** 2)
    terms = terms_of("ustm", progress=0.5)
    assert 0 < len(errors) < 4
    assert float(terms["consistency"].value.detach()) == pytest.approx(sum(errors) / len(errors), abs=1e-5)
    assert float(terms["consistency"].weight) == pytest.approx(math.exp(-5 * 0.25))

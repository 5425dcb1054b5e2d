"""Dual-branch network with dynamically mixed pseudo labels: two decoders, one on features with dropout."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Section
from pclmix.data.batch import Batch
from pclmix.losses import full, planes
from pclmix.losses.supervised import dice_loss, partial_cross_entropy
from pclmix.methods.base import METHODS, Method, Task, Term, Terms
from pclmix.nets.segmenter import build_decoder

Pair = tuple[Tensor, Tensor]  # of the main and the second decoder


class DMPLSParams(Section):
    weight: NonNegative = Field(0.5, description="weight of the Dice to the mixed pseudo labels")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="of the features of the second decoder")


@METHODS.register("dmpls")
class DMPLS(Method):
    summary: ClassVar[str] = "two decoders that supervise each other by mixed pseudo labels"
    source: ClassVar[str] = "Luo et al. 2022, Scribble-Supervised Segmentation via Dual-Branch Network"
    Params: ClassVar[type[Section]] = DMPLSParams

    def __init__(self, task: Task, params: DMPLSParams) -> None:
        super().__init__(task, params)
        self.aux = build_decoder(task.net, self.net.encoder, task.classes)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        features = self.net.features(image)
        return self.net.decode(features), self.aux(features)

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        features = self.net.features(batch.image)
        main = planes(self.net.decode(features))
        aux = planes(self.aux([dropped(f, self.params.dropout, generator) for f in features]))
        return dual_terms((main, aux), (main.softmax(1), aux.softmax(1)), batch.label, self.params.weight, generator)


def dual_terms(logits: Pair, p: Pair, label: Tensor, weight: float, generator: Generator) -> Terms:
    """(pCE1 + pCE2) / 2 and the pseudo supervision, mixed by a weight drawn once a step; p are the probabilities."""
    beta = torch.rand((), generator=generator, device=label.device)
    pce = (partial_cross_entropy(logits[0], label) + partial_cross_entropy(logits[1], label)) / 2
    return {"pce": Term(pce), "pseudo": Term(pseudo_supervision(*p, beta), weight)}


def mixed_pseudo_label(p1: Tensor, p2: Tensor, beta: Tensor) -> Tensor:
    """argmax_k of beta p1 + (1 - beta) p2, not differentiated. p1, p2: (B, K, H, W). beta: 0-dim -> (B, H, W)."""
    return torch.lerp(full(p2.detach()), full(p1.detach()), beta).argmax(1)


def pseudo_supervision(p1: Tensor, p2: Tensor, beta: Tensor) -> Tensor:
    """(Dice(p1, PL) + Dice(p2, PL)) / 2 with PL their mixed pseudo label; a scalar."""
    label = mixed_pseudo_label(p1, p2, beta)
    return (dice_loss(p1, label) + dice_loss(p2, label)) / 2


def dropped(feature: Tensor, rate: float, generator: Generator) -> Tensor:
    """Dropout of single values, drawn from `generator`."""
    return feature * torch.empty_like(feature).bernoulli_(1 - rate, generator=generator).div_(1 - rate)

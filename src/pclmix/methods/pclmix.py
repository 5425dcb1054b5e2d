"""PCLMix: mixing between a CNN and a transformer decoder, uncertainty-guided contrast, dual consistency.

docs/equations.md lists the paper's equations and the functions that compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix import kernels
from pclmix.config import NonNegative, Section, Share
from pclmix.data.batch import Batch
from pclmix.losses import planes
from pclmix.losses.contrast import PrototypeQueue, at_stride, info_nce, prototypes, sample_anchors
from pclmix.losses.supervised import SoftLabel, supervised
from pclmix.losses.unlabelled import entropy_threshold, heterogeneous, mean_prediction, mixed, pseudo_label
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms
from pclmix.mixing import make_mixer
from pclmix.nets.swin import build_auxiliary, forward_dual


class PCLMixParams(Section):
    lambda_t: Share = Field(0.4, description="weight of the transformer decoder in equations 3, 6 and 12")
    lambda_ctr: NonNegative = Field(0.15, description="weight of the contrast, equation 1")
    lambda_con: NonNegative = Field(1.0, description="weight of the consistency, equation 1")
    lambda_het: NonNegative = Field(1.0, description="weight of het in equation 13, for the ablation")
    lambda_mix: NonNegative = Field(1.0, description="weight of mix in equation 13")
    supervise_t: bool = Field(True, description="equation 3 on the transformer decoder too, for the ablation")
    ramp: Share = Field(0.0, description="share of training over which contrast and consistency rise from 0")
    mixer: str = Field("cutmix", description="cutmix, mixup, cutout or saliency")
    mixer_params: dict[str, Any] = Field(default_factory=dict, description="the mixer's own parameters")
    anchors: Annotated[int, Field(ge=1)] = Field(1024, description="N, anchors of equation 8 per step")
    queue: Annotated[int, Field(ge=1)] = Field(500, description="Q, prototypes kept per class")
    temperature: Annotated[float, Field(gt=0)] = Field(0.07, description="tau of equation 8")
    embedding: Annotated[int, Field(ge=1)] = Field(256, description="D, width of the embedding")
    swin_width: Annotated[int, Field(ge=6)] = Field(96, description="channels of the transformer decoder at stride 4")


@METHODS.register("pclmix")
class PCLMix(Method):
    summary: ClassVar[str] = "mixing between heterogeneous decoders, pixel contrast by uncertainty, dual consistency"
    source: ClassVar[str] = "Lei et al. 2024, PCLMix: Pixel-Level Contrastive Learning and Dynamic Mix Augmentation"
    Params: ClassVar[type[Section]] = PCLMixParams
    passes: ClassVar[Passes] = Passes(trained=3)

    def __init__(self, task: Task, params: PCLMixParams) -> None:
        super().__init__(task, params)
        self.aux, self.head = build_auxiliary(self.net, task.classes, params.embedding, params.swin_width)
        self.mixer = make_mixer(params.mixer, params.mixer_params)
        self.queue = PrototypeQueue(task.classes, params.embedding, params.queue)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(forward_dual(self.net, self.aux, self.head, image, len(image)))

    def step(self, batch: Batch, progress: Tensor, generator: Generator) -> Terms:
        params: PCLMixParams = self.params
        x, y = batch.image, batch.label
        order1, order2 = (torch.randperm(len(x), generator=generator, device=x.device) for _ in range(2))
        x1, x2, y1, y2 = x[order1], x[order2], y[order1], y[order2]
        mix = self.mixer.draw(x1, x2, generator)
        x12, x21 = mix.images(x1, x2), mix.images(x2, x1)
        labels = [y, mix.labels(y1, y2), mix.labels(y2, y1)]

        views = torch.cat([x, x12, x21])
        logits_c, logits_t, embedding = forward_dual(self.net, self.aux, self.head, views, len(x))
        # The predictions of the unmixed images are targets and choose anchors: no gradient passes through them.
        p_c, p_t = (planes(logits.detach()[: len(x)]).softmax(1) for logits in (logits_c, logits_t))
        # Order 1 comes from the CNN, order 2 from the transformer.
        p1, p2 = p_c[order1], p_t[order2]
        targets = mix.predictions(p1, p2), mix.predictions(p2, p1)
        lambda_sup = params.lambda_t if params.supervise_t else 0.0
        pixels = pixel_terms(logits_c, logits_t, labels, targets, lambda_sup, params.lambda_t)
        ctr = self._contrast(embedding, p_c, p_t, y, progress, generator) if params.lambda_ctr > 0 else None

        rise = (progress / params.ramp).clamp(max=1.0) if params.ramp > 0 else torch.ones_like(progress)
        con = consistency(pixels.het, pixels.mix, params.lambda_het, params.lambda_mix)
        return objective(pixels.sup, ctr, con, params.lambda_ctr, params.lambda_con, rise)

    def _contrast(
        self, embedding: Tensor, p_c: Tensor, p_t: Tensor, y: Tensor, progress: Tensor, generator: Generator
    ) -> Tensor:
        """Equation 8 on the unmixed images against the queue; the queue then takes the prototypes of this step."""
        params: PCLMixParams = self.params
        p_c, p_t, y = (at_stride(pixels.detach()) for pixels in (p_c, p_t, y))
        pseudo = pseudo_label(mean_prediction(p_c, p_t, params.lambda_t), y, entropy_threshold(progress))
        anchors = sample_anchors(pseudo, p_c.argmax(1), params.anchors, generator)
        entries, filled = self.queue.entries, self.queue.filled
        loss = info_nce(anchors.pick(embedding), anchors.label, anchors.valid, entries, filled, params.temperature)
        self.queue.enqueue(*prototypes(embedding, pseudo, self.task.classes))
        return loss


def objective(
    sup: Tensor, ctr: Tensor | None, con: Terms, lambda_ctr: float, lambda_con: float, rise: float | Tensor = 1.0
) -> Terms:
    """Equation 1: sup + lambda_ctr ctr + lambda_con con, as terms that `base.sum_terms` adds up.

    con: the terms of equation 13. `rise` scales all but sup. Terms of weight 0 are left out.
    """
    rising = {} if ctr is None else {"ctr": Term(ctr, lambda_ctr)}
    rising |= {name: Term(term.value, lambda_con * term.weight) for name, term in con.items()}
    return {"sup": Term(sup)} | {name: Term(t.value, t.weight * rise) for name, t in rising.items() if t.weight > 0}


def consistency(het: Tensor, mix: Tensor, lambda_het: float = 1.0, lambda_mix: float = 1.0) -> Terms:
    """Equation 13: con = het + lambda_mix mix, as two terms, which are logged separately."""
    return {"het": Term(het, lambda_het), "mix": Term(mix, lambda_mix)}


class PixelTerms(NamedTuple):
    """The loss terms over all pixels of all views."""

    sup: Tensor  # equation 4
    het: Tensor  # equation 9
    mix: Tensor  # equation 12


def pixel_terms(
    logits_c: Tensor,
    logits_t: Tensor,
    labels: Sequence[Tensor | SoftLabel],
    targets: tuple[Tensor, Tensor],
    lambda_sup: float,
    lambda_t: float,
) -> PixelTerms:
    """Equations 4, 9 and 12 from the logits (3B, K, H, W) of x, x12 and x21.

    labels: one (B, H, W) for each view. targets: the mixed predictions p12 and p21, (B, K, H, W). `lambda_sup` is
    lambda_t of equation 3, `lambda_t` that of equation 6. On a GPU one kernel computes all three, unless labels are
    blended.
    """
    hard = [label for label in labels if isinstance(label, Tensor)]
    if len(hard) == len(labels) and kernels.usable("losses", logits_c):
        from pclmix.kernels import losses as fused

        if fused.pixel_terms_fit(logits_c, logits_t):
            return PixelTerms(*fused.pixel_terms(logits_c, logits_t, hard, targets, lambda_sup, lambda_t))
    logits_c, logits_t = planes(logits_c), planes(logits_t)
    p_c, p_t = logits_c.softmax(1).chunk(3), logits_t.softmax(1).chunk(3)
    q12, q21 = (mean_prediction(p_c[view], p_t[view], lambda_t) for view in (1, 2))
    return PixelTerms(
        supervised(logits_c.chunk(3), logits_t.chunk(3), labels, lambda_sup),
        heterogeneous(p_c, p_t),
        mixed(targets[0], q12, targets[1], q21),
    )

"""PCLMix: dynamic mixing between two kinds of decoder, contrast guided by uncertainty, dual consistency."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from pclmix.config import NonNegative, Section, Share
from pclmix.data.batch import Batch
from pclmix.losses.contrast import at_stride, info_nce, prototypes, sample_anchors
from pclmix.losses.pixel_terms import PixelTerms, pixel_terms
from pclmix.losses.precision import classes_outermost
from pclmix.losses.queue import PrototypeQueue
from pclmix.losses.uncertainty import entropy_threshold, mean_prediction, pseudo_label
from pclmix.methods.base import METHODS, Method, Passes, Task, Term, Terms
from pclmix.mixing import make_mixer
from pclmix.nets import fused
from pclmix.nets.dual import DualOutput, build_auxiliary, forward_dual
from pclmix.soft_label import SoftLabel


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
    mix_axis: Literal["image", "pixel"] = Field("image", description="what one cosine of equation 12 runs over")
    anchors: Annotated[int, Field(ge=1)] = Field(1024, description="N, anchors of equation 8 a step")
    queue: Annotated[int, Field(ge=1)] = Field(500, description="Q, prototypes kept per class")
    temperature: Annotated[float, Field(gt=0)] = Field(0.07, description="tau of equation 8")
    embedding: Annotated[int, Field(ge=1)] = Field(256, description="D, width of the embedding")
    swin_width: Annotated[int, Field(ge=6)] = Field(96, description="channels of the transformer decoder at stride 4")
    passes: Literal[1, 3] = Field(1, description="forward passes for the 3B images; BatchNorm sees each pass alone")
    drop_path: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="stochastic depth of the Swin blocks")
    absolute_position: bool = Field(False, description="absolute position embedding in the Swin decoder")


@METHODS.register("pclmix")
class PCLMix(Method):
    summary: ClassVar[str] = "mixing between heterogeneous decoders, pixel contrast by uncertainty, dual consistency"
    source: ClassVar[str] = "Lei et al. 2024, PCLMix: Pixel-Level Contrastive Learning and Dynamic Mix Augmentation"
    Params: ClassVar[type[Section]] = PCLMixParams
    passes: ClassVar[Passes] = Passes(trained=3)

    def __init__(self, task: Task, params: PCLMixParams) -> None:
        super().__init__(task, params)
        self.aux, self.head = build_auxiliary(
            self.net, task.classes, params.drop_path, params.absolute_position, params.embedding, params.swin_width
        )
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
        views = [x, mix.images(x1, x2), mix.images(x2, x1)]
        labels = [y, mix.labels(y1, y2), mix.labels(y2, y1)]

        logits_c, logits_t, embedding = self._forward(views)
        # What is predicted for the unmixed images teaches the mixed ones and chooses anchors; no gradient passes.
        p_c, p_t = (classes_outermost(logits.detach()[: len(x)]).softmax(1) for logits in (logits_c, logits_t))
        # Each view's target comes from the other kind of decoder: order 1 from Fc, order 2 from Ft.
        p1, p2 = p_c[order1], p_t[order2]
        targets = mix.predictions(p1, p2), mix.predictions(p2, p1)
        pixels = self._pixel_terms(logits_c, logits_t, labels, targets)

        terms = {"sup": Term(pixels.sup)}
        rise = (progress / params.ramp).clamp(max=1.0) if params.ramp > 0 else torch.ones_like(progress)
        if params.lambda_ctr > 0:
            value = self._contrast(embedding, p_c, p_t, y, progress, generator)
            terms["ctr"] = Term(value, params.lambda_ctr * rise)
        if params.lambda_con * params.lambda_het > 0:
            terms["het"] = Term(pixels.het, params.lambda_con * params.lambda_het * rise)
        if params.lambda_con * params.lambda_mix > 0:
            terms["mix"] = Term(pixels.mix, params.lambda_con * params.lambda_mix * rise)
        return terms

    def _forward(self, views: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of both decoders (3B, K, H, W) for the three views, and the embedding of the unmixed one."""
        count = len(views[0])
        images = [torch.cat(views)] if self.params.passes == 1 else views
        outs: list[DualOutput] = [forward_dual(self.net, self.aux, self.head, x, count) for x in images]
        logits = [[out.logits_c for out in outs], [out.logits_t for out in outs]]
        logits_c, logits_t = (one[0] if len(one) == 1 else torch.cat(one) for one in logits)
        return logits_c, logits_t, outs[0].embeddings

    def _pixel_terms(
        self, logits_c: Tensor, logits_t: Tensor, labels: list[Tensor | SoftLabel], targets: tuple[Tensor, Tensor]
    ) -> PixelTerms:
        """Equations 4, 9 and 12: on a GPU in bf16 in two passes over the logits, where labels are not blended."""
        params: PCLMixParams = self.params
        lambda_sup = params.lambda_t if params.supervise_t else 0.0
        hard = [label for label in labels if isinstance(label, Tensor)]
        if len(hard) == len(labels) and params.mix_axis == "image" and fused.usable("losses", logits_c):
            from pclmix.losses import fused as fused_losses

            if fused_losses.fits(logits_c, logits_t):
                return fused_losses.pixel_terms(logits_c, logits_t, hard, targets, lambda_sup, params.lambda_t)
        return pixel_terms(logits_c, logits_t, labels, targets, lambda_sup, params.lambda_t, params.mix_axis)

    def _contrast(
        self, embedding: Tensor, p_c: Tensor, p_t: Tensor, y: Tensor, progress: Tensor, generator: Generator
    ) -> Tensor:
        """Equation 8 on the unmixed images against the queue; the queue takes this step's prototypes afterwards."""
        params: PCLMixParams = self.params
        p_c, p_t, y = (at_stride(pixels.detach()) for pixels in (p_c, p_t, y))
        pseudo = pseudo_label(mean_prediction(p_c, p_t, params.lambda_t), y, entropy_threshold(progress))
        anchors = sample_anchors(pseudo, p_c.argmax(1), params.anchors, generator)
        entries, filled = self.queue.entries, self.queue.filled
        loss = info_nce(anchors.pick(embedding), anchors.label, anchors.valid, entries, filled, params.temperature)
        self.queue.enqueue(*prototypes(embedding, pseudo, self.task.classes))
        return loss

"""Pixel contrast against a queue of class prototypes (equation 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.losses.precision import full, no_autocast

TEMPERATURE = 0.07
ANCHORS = 1024
#: From the image to the map on which the embedding is computed.
STRIDE = 8
#: More than any label (labels are kept as int16), and a key after all others.
_LABELS, _LAST = 2**15, 2**62


@dataclass(frozen=True)
class Anchors:
    """N places in a (B, h, w) map: `index` (N) into the flattened map, `label` (N), `valid` (N) bool.

    Where `valid` is false there were not enough candidates: index and label are 0 and mean nothing.
    """

    index: Tensor
    label: Tensor
    valid: Tensor

    def pick(self, embedding: Tensor) -> Tensor:
        """The embeddings of the anchors, (B, D, h, w) -> (N, D), differentiable."""
        return embedding.permute(0, 2, 3, 1).flatten(0, 2).index_select(0, self.index)


def at_stride(pixels: Tensor, stride: int = STRIDE) -> Tensor:
    """Thin (..., H, W) to (..., h, w): the pixel on which the encoder's padded, strided filters are centred."""
    return pixels[..., ::stride, ::stride]


def sample_anchors(pseudo: Tensor, predicted: Tensor, count: int, generator: torch.Generator) -> Anchors:
    """Anchors for equation 8: `count` places with a pseudo label, spread evenly over the classes present.

    pseudo: (B, h, w), candidates where >= 0. predicted: (B, h, w), the class the CNN branch gives. Within a class half
    of the anchors are hard (predicted differs from pseudo) where there are enough; what a class or the hard half
    lacks goes to the others. Always `count` places; those without a candidate are not valid.
    """
    label, hard = pseudo.flatten(), (predicted != pseudo).flatten()
    candidate = label >= 0
    order = torch.rand(label.shape, generator=generator, device=label.device).argsort(stable=True)

    # A random rank among the hard and among the easy of each class; then the two are dealt alternately.
    group = (2 * label + ~hard).masked_fill(~candidate, _LAST)
    rank = _rank_within(group, order)
    turn = 2 * rank + ~hard
    # The rank within the class after dealing: the first n of a class are half hard where they can be.
    class_rank = _rank_within(label.masked_fill(~candidate, _LAST), turn.argsort())

    # The lowest ranks over all classes; the class settles ties, so that one seed has one answer.
    top = min(count, label.numel())
    key = (class_rank * _LABELS + label).masked_fill(~candidate, _LAST)
    # A full sort: for 12 288 candidates topk of int64 took 152 us on an H200, a sort 50 us at most.
    index = F.pad(key.argsort()[:top], (0, count - top))
    valid = candidate[index] & (torch.arange(count, device=label.device) < top)
    return Anchors(index.masked_fill(~valid, 0), label[index].masked_fill(~valid, 0), valid)


def _rank_within(group: Tensor, order: Tensor) -> Tensor:
    """For each item its place, from 0, among the items of the same group taken in `order`. group, order: (M)."""
    ordered, position = group[order].sort(stable=True)
    place = torch.arange(len(group), device=group.device)
    starts = torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    # A group begins where the value changes; the running maximum carries that place through the group.
    begin = place.masked_fill(~starts, 0).cummax(0).values
    return torch.empty_like(place).scatter_(0, order[position], place - begin)


def info_nce(
    anchors: Tensor, label: Tensor, valid: Tensor, entries: Tensor, filled: Tensor, temperature: float = TEMPERATURE
) -> Tensor:
    """Equation 8: -log e^{s+} / (e^{s+} + sum over negatives of e^{s-}), s = cos / tau.

    The mean over an anchor's positives (filled entries of its class), then over anchors; the negatives are the filled
    entries of all other classes. anchors: (N, D). label, valid: (N). entries: (K, Q, D), not differentiated.
    filled: (K, Q) bool. An anchor that is not valid or has no positive is left out; 0, with a gradient of zeros, when
    none is left.
    """
    classes, length, _ = entries.shape
    with no_autocast(anchors):
        v = F.normalize(full(anchors), dim=1)
        # Normalising makes a copy, too: the queue may take new entries before the gradient is computed.
        bank = F.normalize(full(entries.detach()), dim=2).to(v.dtype)
        similarity = (v @ bank.flatten(0, 1).T / temperature).view(-1, classes, length)

    own = label[:, None] == torch.arange(classes, device=label.device)
    negative = filled & ~own[:, :, None]
    # Finite, unlike -inf: an anchor without negatives then has a gradient of 0 and not of NaN.
    absent = torch.finfo(similarity.dtype).min / 2
    negatives = similarity.masked_fill(~negative, absent).flatten(1).logsumexp(1)

    at_own = label[:, None, None].expand(-1, 1, length)
    positives = similarity.gather(1, at_own).squeeze(1)
    positive = filled[label]
    # -log(e^p / (e^p + e^n)) = softplus(n - p), which overflows nowhere.
    per_positive = F.softplus(negatives[:, None] - positives).masked_fill(~positive, 0)
    per_anchor = per_positive.sum(1) / positive.sum(1).clamp(min=1)
    counted = valid & positive.any(1)
    return per_anchor.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def prototypes(embedding: Tensor, pseudo: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The normalised mean embedding of each class in each image, for the queue.

    embedding: (B, D, h, w), not differentiated. pseudo: (B, h, w). Returns (B, K, D) and valid (B, K) bool; where an
    image lacks a class the prototype is zeros and not valid.
    """
    member = pseudo.flatten(1)[:, None] == torch.arange(classes, device=pseudo.device)[:, None]
    with no_autocast(embedding):
        rows = full(embedding.detach()).flatten(2).transpose(1, 2)
        # The sum's direction is the mean's.
        total = member.to(rows.dtype) @ rows
    return F.normalize(total, dim=2), member.any(2)

"""Contrast between pixels: against a queue of class prototypes (equation 8), and between two decoders (SC-Net)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.kernels.collective import gather_rows
from pclmix.losses import full, no_autocast

TEMPERATURE = 0.07
#: From the image to the map on which the embedding is computed.
STRIDE = 8
#: More than any label (labels are kept as int16), and a key after all others.
_LABELS, _LAST = 2**15, 2**62
LENGTH = 500


@dataclass(frozen=True)
class Anchors:
    """N places in a (B, h, w) map: `index` (N) into the flattened map, `label` (N), `valid` (N) bool.

    Where `valid` is false there were not enough candidates: index and label are 0 and have no meaning.
    """

    index: Tensor
    label: Tensor
    valid: Tensor

    def pick(self, embedding: Tensor) -> Tensor:
        """The embeddings of the anchors, (B, D, h, w) -> (N, D), differentiable."""
        return embedding.permute(0, 2, 3, 1).flatten(0, 2).index_select(0, self.index)


def at_stride(pixels: Tensor, stride: int = STRIDE) -> Tensor:
    """Subsample (..., H, W) to (..., h, w): the pixels on which the encoder's padded, strided filters are centred."""
    return pixels[..., ::stride, ::stride]


def sample_anchors(pseudo: Tensor, predicted: Tensor, count: int, generator: torch.Generator) -> Anchors:
    """Anchors for equation 8: `count` places with a pseudo label, spread evenly over the classes present.

    pseudo: (B, h, w), candidates where >= 0. predicted: (B, h, w), the class the CNN branch gives. Within a class half
    of the anchors are hard (predicted differs from pseudo) where there are enough; other classes, or easy pixels, fill
    what a class or its hard half lacks. Always `count` places; those without a candidate are not valid.
    """
    label, hard = pseudo.flatten(), (predicted != pseudo).flatten()
    candidate = label >= 0
    order = torch.rand(label.shape, generator=generator, device=label.device).argsort(stable=True)

    # A random rank among the hard and among the easy of each class; then hard and easy alternate.
    group = (2 * label + ~hard).masked_fill(~candidate, _LAST)
    rank = _rank_within(group, order)
    turn = 2 * rank + ~hard
    # The rank within the class after alternating: the first n of a class are half hard where possible.
    class_rank = _rank_within(label.masked_fill(~candidate, _LAST), turn.argsort())

    # The lowest ranks over all classes; ties are broken by class, so that a seed gives one result.
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
        # Normalising copies, so that the queue may change before the gradient is computed.
        bank = F.normalize(full(entries.detach()), dim=2).to(v.dtype)
        similarity = (v @ bank.flatten(0, 1).T / temperature).view(-1, classes, length)

    own = label[:, None] == torch.arange(classes, device=label.device)
    negative = filled & ~own[:, :, None]
    # Finite, unlike -inf: an anchor without negatives then has gradient 0 instead of NaN.
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
        # The sum has the direction of the mean.
        total = member.to(rows.dtype) @ rows
    return F.normalize(total, dim=2), member.any(2)


class PrototypeQueue(nn.Module):
    """A ring buffer of the last `length` prototypes of every class, background too; part of the state dict.

    entries: (K, Q, D). count: (K), how many were ever added; count mod Q is the next place to write.
    """

    entries: Tensor
    count: Tensor

    def __init__(self, classes: int, width: int, length: int = LENGTH) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(classes, length, width))
        self.register_buffer("count", torch.zeros(classes, dtype=torch.int64))

    @property
    def filled(self) -> Tensor:
        """(K, Q) bool: the places that hold a prototype."""
        return torch.arange(self.entries.shape[1], device=self.count.device) < self.count[:, None]

    @torch.no_grad()
    def enqueue(self, prototypes: Tensor, valid: Tensor) -> None:
        """Add the valid ones of prototypes (B, K, D), valid (B, K), of all ranks in rank order, dropping the oldest.

        All ranks must call this together and then hold the same queue. The buffers change in place. Of more than Q of
        one class the last Q are kept.
        """
        # One collective instead of two: the flag is a further column.
        flagged = gather_rows(torch.cat([full(prototypes), valid.unsqueeze(2).to(full(prototypes).dtype)], dim=2))
        prototypes, valid = flagged[:, :, :-1], flagged[:, :, -1] > 0
        rows, length = valid.shape[0], self.entries.shape[1]
        # For each place of the ring, the row written to it: there are few places and no collisions.
        new = valid.sum(0)[:, None]
        turn = (torch.arange(length, device=new.device) - self.count[:, None]) % length
        # Of the rows turn, turn + Q, turn + 2Q, ... that land here the last one is kept.
        nth = turn + (new - 1 - turn).clamp(min=0) // length * length
        valid_first = (~valid).to(torch.uint8).argsort(dim=0, stable=True).T
        row = valid_first.gather(1, nth.clamp(max=rows - 1))
        landed = prototypes.transpose(0, 1).gather(1, row[:, :, None].expand(-1, -1, prototypes.shape[2]))
        self.entries.copy_(torch.where((turn < new)[:, :, None], landed.to(self.entries.dtype), self.entries))
        self.count.add_(new.squeeze(1))


def sample_classes(label: Tensor, classes: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` random pixels of each class. label: (B, h, w), IGNORE for no class.

    Returns indices (K, count) into the flattened map and valid (K, count) bool, false where a class has fewer pixels.
    """
    flat = label.flatten()
    own = flat == torch.arange(classes, device=label.device)[:, None]
    lot = torch.rand(flat.shape, generator=generator, device=label.device)
    # One sort for all classes: the order is random, so the first of a class are a random sample of it.
    place = torch.where(own, lot, 2.0)
    lowest, index = place.topk(min(count, flat.numel()), dim=1, largest=False)
    lacking = count - index.shape[1]
    index, lowest = (torch.nn.functional.pad(t, (0, lacking), value=v) for t, v in ((index, 0), (lowest, 2.0)))
    return index, lowest < 2


def class_contrast(f1: Tensor, f2: Tensor, index: Tensor, valid: Tensor, temperature: float = 0.1) -> Tensor:
    """InfoNCE of each decoder's features against the other's, the mean of both directions.

    f1, f2: (B, D, h, w). index, valid: (K, n) as sampled. Positives are the other decoder's features of the same
    class, negatives those of all other classes; what is compared with is not differentiated. 0 where nothing is valid.
    """
    classes, count = index.shape
    label = torch.arange(classes, device=index.device).repeat_interleave(count)
    one, two = (f.permute(0, 2, 3, 1).flatten(0, 2).index_select(0, index.flatten()) for f in (f1, f2))

    def against(anchors: Tensor, others: Tensor) -> Tensor:
        entries = others.detach().view(classes, count, -1)
        return info_nce(anchors, label, valid.flatten(), entries, valid, temperature)

    return (against(one, two) + against(two, one)) / 2

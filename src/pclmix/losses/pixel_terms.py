"""The three terms that look at every pixel of every view: supervision, and both kinds of consistency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pclmix.losses.consistency import Axis, heterogeneous, mixed
from pclmix.losses.partial_ce import supervised
from pclmix.losses.precision import classes_outermost
from pclmix.losses.uncertainty import mean_prediction
from pclmix.losses.whole_slice import Known, absent_cross_entropy
from pclmix.soft_label import SoftLabel


class PixelTerms(NamedTuple):
    sup: Tensor  # equation 4
    het: Tensor  # equation 9
    mix: Tensor  # equation 12
    absent: Tensor | None = None  # whole_slice.absent_cross_entropy, divided and added as equations 3 and 4


def pixel_terms(
    logits_c: Tensor,
    logits_t: Tensor,
    labels: Sequence[Tensor | SoftLabel],
    targets: tuple[Tensor, Tensor],
    lambda_sup: float,
    lambda_t: float,
    axis: Axis = "image",
    known: Sequence[Known] = (),
) -> PixelTerms:
    """Equations 4, 9 and 12 on the logits (3B, K, H, W) of x, x12 and x21; fused.py computes the same in two passes.

    labels: one for each view, (B, H, W). targets: the mixed predictions p12 and p21 (B, K, H, W). `lambda_sup` is the
    share of the transformer in equation 4, `lambda_t` in equation 6. `known`, where given, is one for each view.
    """
    # The terms pass over the logits many times, and are fastest on that layout.
    logits_c, logits_t = classes_outermost(logits_c), classes_outermost(logits_t)
    p_c, p_t = logits_c.softmax(1).chunk(3), logits_t.softmax(1).chunk(3)
    q12, q21 = (mean_prediction(p_c[v], p_t[v], lambda_t) for v in (1, 2))
    views_c, views_t = logits_c.chunk(3), logits_t.chunk(3)
    return PixelTerms(
        supervised(_as_drawn(views_c, known), _as_drawn(views_t, known), labels, lambda_sup),
        heterogeneous(p_c, p_t),
        mixed(targets[0], q12, targets[1], q21, axis),
        _absent(views_c, views_t, labels, known, lambda_sup),
    )


def _as_drawn(views: Sequence[Tensor], known: Sequence[Known]) -> Sequence[Tensor]:
    """Logits of the classes among drawn pixels, p(k | drawn) ~ p(k) density(k): a stroke is one of those."""
    densities = [one.log_density for one in known if one.log_density is not None]
    return [view + density for view, density in zip(views, densities, strict=True)] if densities else views


def _absent(
    views_c: Sequence[Tensor],
    views_t: Sequence[Tensor],
    labels: Sequence[Tensor | SoftLabel],
    known: Sequence[Known],
    lambda_sup: float,
) -> Tensor | None:
    values = []
    for c, t, label, one in zip(views_c, views_t, labels, known, strict=False):
        if one.present is None:
            return None
        drawn = label if isinstance(label, Tensor) else label.mask().long() - 1
        of_c, of_t = (absent_cross_entropy(logits, drawn, one.present) for logits in (c, t))
        values.append((1 - lambda_sup) * of_c + lambda_sup * of_t)
    return torch.stack(values).sum() if values else None

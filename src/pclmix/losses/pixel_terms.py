"""The three terms that look at every pixel of every view: supervision, and both kinds of consistency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pclmix.losses.consistency import Axis, heterogeneous, mixed
from pclmix.losses.partial_ce import supervised
from pclmix.losses.precision import classes_outermost
from pclmix.losses.uncertainty import mean_prediction
from pclmix.soft_label import SoftLabel


class PixelTerms(NamedTuple):
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
    axis: Axis = "image",
) -> PixelTerms:
    """Equations 4, 9 and 12 on the logits (3B, K, H, W) of x, x12 and x21; fused.py computes the same in two passes.

    labels: one for each view, (B, H, W). targets: the mixed predictions p12 and p21 (B, K, H, W). `lambda_sup` is the
    share of the transformer in equation 4, `lambda_t` in equation 6.
    """
    # The terms pass over the logits many times, and are fastest on that layout.
    logits_c, logits_t = classes_outermost(logits_c), classes_outermost(logits_t)
    p_c, p_t = logits_c.softmax(1).chunk(3), logits_t.softmax(1).chunk(3)
    q12, q21 = (mean_prediction(p_c[v], p_t[v], lambda_t) for v in (1, 2))
    return PixelTerms(
        supervised(logits_c.chunk(3), logits_t.chunk(3), labels, lambda_sup),
        heterogeneous(p_c, p_t),
        mixed(targets[0], q12, targets[1], q21, axis),
    )

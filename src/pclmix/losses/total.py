"""The whole objective (equation 1)."""

from __future__ import annotations

from torch import Tensor

#: The weights of contrast and consistency, lambda_ctr and lambda_con of the paper.
LAMBDA_CTR = 0.15
LAMBDA_CON = 1.0


def total(
    sup: Tensor, ctr: Tensor, con: Tensor, lambda_ctr: float = LAMBDA_CTR, lambda_con: float = LAMBDA_CON
) -> Tensor:
    """Equation 1: sup + lambda_ctr ctr + lambda_con con."""
    return sup + lambda_ctr * ctr + lambda_con * con

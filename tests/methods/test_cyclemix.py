from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pclmix.data.batch import Batch
from pclmix.methods.base import Task, build_params, sum_terms
from pclmix.methods.cyclemix import CycleMix
from pclmix.mixing import squares


def build(**params: Any) -> CycleMix:
    torch.manual_seed(0)
    return CycleMix(Task("resnet10", 1, 4, (64, 64)), build_params(CycleMix, params)).train()  # type: ignore[arg-type]


def test_squares_lie_inside_and_have_their_size() -> None:
    mask = squares(torch.zeros(20, 1, 48, 40), 32, torch.Generator().manual_seed(0))
    assert mask.sum((1, 2, 3)).tolist() == [32 * 32] * 20
    assert len(mask.flatten(1).unique(dim=0)) > 10
    assert squares(torch.zeros(2, 1, 8, 8), 32, torch.Generator()).all()


@pytest.mark.parametrize("saliency", ["gradient", "contrast"])
def test_both_kinds_of_saliency(saliency: str, batch_for: Callable[..., Batch]) -> None:
    method, batch = build(saliency=saliency), batch_for(CycleMix, 0, 3)
    terms = method.step(batch, torch.zeros(()), torch.Generator().manual_seed(0))
    sum_terms(terms).backward()  # type: ignore[no-untyped-call]
    assert set(terms) == {"pce", "mix_pce", "mix", "component"}
    assert 0 <= float(terms["mix"].value.detach()) <= 1
    assert 0 <= float(terms["component"].value.detach()) <= 1
    assert batch.image.grad is None
    assert not batch.image.requires_grad


def test_looking_for_saliency_leaves_no_gradient_behind(batch_for: Callable[..., Batch]) -> None:
    method = build()
    method.step(batch_for(CycleMix), torch.zeros(()), torch.Generator().manual_seed(0))
    assert all(p.grad is None for p in method.parameters())


def test_an_image_that_is_all_hidden_costs_no_agreement(batch_for: Callable[..., Batch]) -> None:
    terms = build(occlusion=64).step(batch_for(CycleMix), torch.zeros(()), torch.Generator().manual_seed(0))
    assert float(terms["mix_pce"].value.detach()) == 0

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pclmix.data.batch import Batch
from pclmix.errors import PclmixError
from pclmix.methods.base import Task, build_params
from pclmix.methods.s2l import S2L


def build(size: tuple[int, int] = (64, 64)) -> S2L:
    torch.manual_seed(0)
    return S2L(Task("unet", 1, 4, size, 6), build_params(S2L, {})).train()  # type: ignore[arg-type]


def test_pseudo_labels_count_after_a_tenth(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(), batch_for(S2L)
    for progress, weight in ((0.0, 0.0), (0.09, 0.0), (0.1, 0.5), (1.0, 0.5)):
        terms = method.step(batch, torch.full((), progress), torch.Generator())
        assert float(terms["pseudo"].weight) == weight


def test_updates_only_slices_of_the_batch(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(), replace(batch_for(S2L), index=torch.tensor([4, 1]))
    method.step(batch, torch.zeros(()), torch.Generator())
    assert method.memory.mean.flatten(1).any(1).tolist() == [False, True, False, False, True, False]


def test_running_mean_uses_evaluation_mode(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(), replace(batch_for(S2L), theta=None)
    before = {name: b.clone() for name, b in method.net.named_buffers()}
    one, two = method._predict(batch.image), method._predict(batch.image)
    assert torch.equal(one, two)  # no dropout
    assert all(torch.equal(b, before[name]) for name, b in method.net.named_buffers())
    assert method.net.training
    torch.testing.assert_close(one, method.net.eval()(batch.image).softmax(1))


def test_confident_pixels_become_labels(batch_for: Callable[..., Batch]) -> None:
    method, batch = build(), replace(batch_for(S2L), theta=None, index=torch.tensor([0, 1]))
    method.memory.mean[:, 2] = 255  # the mean has long been confident of class 2
    terms = method.step(batch, torch.ones(()), torch.Generator())
    assert float(terms["pseudo"].value.detach()) > 0


def test_refuses_strides_that_do_not_divide_the_image() -> None:
    with pytest.raises(PclmixError, match=r"params\.stride=3"):
        S2L(Task("unet", 1, 4, (64, 64), 6), build_params(S2L, {"stride": 3}))  # type: ignore[arg-type]

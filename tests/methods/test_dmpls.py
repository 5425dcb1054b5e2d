"""DMPLS and SC-Net, which builds on it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pclmix.data.batch import Batch
from pclmix.labels import IGNORE
from pclmix.losses.supervised import dice_loss, partial_cross_entropy
from pclmix.methods.base import Task, build_params
from pclmix.methods.dmpls import DMPLS, dropped, dual_terms, mixed_pseudo_label, pseudo_supervision
from pclmix.methods.scnet import SCNet


def test_terms_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    main, aux = (torch.randn(2, 3, 4, 4, generator=g) for _ in range(2))
    label = torch.randint(-1, 3, (2, 4, 4), generator=g)
    terms = dual_terms((main, aux), (main.softmax(1), aux.softmax(1)), label, 0.5, torch.Generator().manual_seed(4))
    beta = torch.rand((), generator=torch.Generator().manual_seed(4))
    pseudo = (beta * main.softmax(1) + (1 - beta) * aux.softmax(1)).argmax(1)
    expected = (partial_cross_entropy(main, label) + partial_cross_entropy(aux, label)) / 2
    torch.testing.assert_close(terms["pce"].value, expected)
    expected = (dice_loss(main.softmax(1), pseudo) + dice_loss(aux.softmax(1), pseudo)) / 2
    torch.testing.assert_close(terms["pseudo"].value, expected)
    assert terms["pseudo"].weight == 0.5


def test_dropped_scales_kept_values() -> None:
    out = dropped(torch.ones(50, 50), 0.5, torch.Generator().manual_seed(0))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert float(out.mean()) == pytest.approx(1, abs=0.1)
    assert torch.equal(dropped(torch.ones(3), 0.0, torch.Generator()), torch.ones(3))


def test_only_the_second_decoder_sees_dropout(batch_for: Callable[..., Batch]) -> None:
    torch.manual_seed(0)
    params = build_params(DMPLS, {"dropout": 0.9})
    method = DMPLS(Task("resnet10", 1, 4, (64, 64)), params).train()  # type: ignore[arg-type]
    image = batch_for(DMPLS).image
    main, aux = method(image)
    assert not torch.allclose(main, aux)
    torch.testing.assert_close(main, method.net(image))


def test_scnet_walks_and_ramps(batch_for: Callable[..., Batch]) -> None:
    image = np.zeros((1, 64, 64), np.float32)
    image[:, :, 32:] = 1
    scribble = np.full((64, 64), IGNORE, np.int16)
    scribble[30, 10:20] = 1
    walked = SCNet.precompute(image, scribble)["walked"]
    assert (walked == 1).sum() > 10
    assert not (walked[:, 33:] == 1).any()
    method = SCNet(Task("resnet10", 1, 4, (64, 64)), build_params(SCNet, {})).train()  # type: ignore[arg-type]
    batch = batch_for(SCNet)
    for progress, share in ((0.0, math.exp(-5)), (0.25, math.exp(-5 / 4)), (0.5, 1.0), (1.0, 1.0)):
        terms = method.step(batch, torch.full((), progress), torch.Generator().manual_seed(0))
        assert float(terms["contrast"].weight) == pytest.approx(0.01 * share)
    assert terms["walk"].weight == 0.005


def test_mixed_pseudo_label_by_hand() -> None:
    p1 = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).T[None, :, None, :]
    p2 = torch.tensor([[0.2, 0.8], [0.3, 0.7]]).T[None, :, None, :]
    # beta 0.5: (0.55, 0.45) and (0.35, 0.65); beta 0.1: (0.27, 0.73) for the first pixel.
    assert mixed_pseudo_label(p1, p2, torch.tensor(0.5)).tolist() == [[[0, 1]]]
    assert mixed_pseudo_label(p1, p2, torch.tensor(0.1)).tolist() == [[[1, 1]]]


def test_pseudo_supervision_is_the_mean_of_two_dice() -> None:
    g = torch.Generator().manual_seed(0)
    p1, p2 = (torch.randn(2, 3, 5, 5, generator=g).softmax(1).requires_grad_() for _ in range(2))
    beta = torch.tensor(0.3)
    label = (0.3 * p1 + 0.7 * p2).argmax(1)
    loss = pseudo_supervision(p1, p2, beta)
    assert float(loss.detach()) == pytest.approx(float((dice_loss(p1, label) + dice_loss(p2, label)).detach()) / 2)
    loss.backward()
    assert p1.grad is not None
    assert p1.grad.any()
    assert p2.grad is not None
    assert p2.grad.any()

"""Every registered method, on the U-Net and on a small ResNet, fulfils the contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pclmix.methods.base import METHODS, find_method, load_all

load_all()
#: PCLMix's transformer decoder needs features at strides 4 to 32, which the family's U-Net does not have.
CASES = [(name, net) for name in METHODS.names() for net in ("unet", "resnet18") if (name, net) != ("pclmix", "unet")]
Make = Callable[..., Any]

each = pytest.mark.parametrize(("name", "net"), CASES)
#: Where the network makes no difference.
once = pytest.mark.parametrize(("name", "net"), [c for c in CASES if c[1] == "unet" or c[0] == "pclmix"])


@each
def test_loss_and_gradients(name: str, net: str, contract: Make) -> None:
    kept = contract(name, find_method(name), net)
    kept.describes_itself()
    kept.has_finite_loss_and_gradients_where_they_belong()


@once
def test_terms_are_the_same_at_every_step(name: str, net: str, contract: Make) -> None:
    contract(name, find_method(name), net).has_the_same_terms_at_every_step()


@each
def test_batch_without_scribbles(name: str, net: str, contract: Make) -> None:
    contract(name, find_method(name), net).is_finite_without_scribbles()


@each
def test_state_and_seed(name: str, net: str, contract: Make) -> None:
    contract(name, find_method(name), net).is_reproducible_and_restores_its_state()


@each
def test_no_waiting(name: str, net: str, contract: Make, no_sync: Callable[[], AbstractContextManager[Any]]) -> None:
    contract(name, find_method(name), net).never_waits_for_the_device(no_sync)


@once
def test_precision(name: str, net: str, contract: Make) -> None:
    contract(name, find_method(name), net).runs_in_low_precision()


@each
def test_prediction(name: str, net: str, contract: Make) -> None:
    kept = contract(name, find_method(name), net)
    kept.predicts_with_each_of_its_inference_nets()
    kept.accepts_unaugmented_batches()

"""The contract of all methods as a class, which the test of the documentation's example uses as well."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pclmix.config import Augment
from pclmix.data.batch import Batch, draw_affine
from pclmix.labels import IGNORE
from pclmix.methods.base import Method, Task, Terms, build_params, sum_terms
from pclmix.nets.segmenter import Segmenter, build_segmenter

SIDE, CLASSES, SLICES = 64, 4, 6
NoSync = Callable[[], AbstractContextManager[Any]]
#: Parameters that make a method's step small.
SMALL = {"pclmix": {"anchors": 32, "queue": 8, "embedding": 16}, "ustm": {"views": 2}}


def make_batch(method: type[Method], seed: int = 0, count: int = 2, scribbled: bool = True) -> Batch:
    """Soft blobs, a few of whose pixels are scribbled, with the method's own maps and a drawn augmentation."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 1, 8, 8, generator=g)
    image = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear").clamp(0, 1)
    label = (image[:, 0] * CLASSES).long().clamp(max=CLASSES - 1)
    label[torch.rand(label.shape, generator=g) > 0.03] = IGNORE
    if not scribbled:
        label.fill_(IGNORE)
    maps = [method.precompute(x.numpy(), y.numpy().astype(np.int16)) for x, y in zip(image, label, strict=True)]
    stacked = {name: torch.from_numpy(np.stack([m[name] for m in maps])).long() for name in maps[0]}
    theta = draw_affine(count, (SIDE, SIDE), Augment(), g)
    return Batch(image, label, torch.randperm(SLICES, generator=g)[:count], stacked, theta)


class Contract:
    """One method on one network; each check holds for every method."""

    def __init__(self, name: str, method: type[Method], net: str) -> None:
        self.name, self.method, self.net = name, method, net

    def build(self, seed: int = 0) -> Method:
        torch.manual_seed(seed)
        task = Task(self.net, 1, CLASSES, (SIDE, SIDE), SLICES)
        return self.method(task, build_params(self.method, SMALL.get(self.name, {}))).train()

    def run(self, method: Method, batch: Batch, progress: float = 0.5, seed: int = 0) -> Terms:
        """One step with its gradients, as the engine does it, without the optimiser."""
        torch.manual_seed(seed)
        method.zero_grad()
        terms = method.step(batch, torch.full((), progress), torch.Generator().manual_seed(seed))
        sum_terms(terms).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            method.update(torch.full((), progress))
        return terms

    def describes_itself(self) -> None:
        assert self.method.summary
        assert self.method.source
        assert self.method.needs in ("scribbles", "dense masks")
        assert all(field.description for field in self.method.Params.model_fields.values())
        assert self.method.inference_nets[0] == "net"
        assert self.method.passes.trained > 0

    def has_finite_loss_and_gradients_where_they_belong(self) -> None:
        method = self.build()
        terms = self.run(method, make_batch(self.method))
        assert terms
        for name, term in terms.items():
            assert term.value.shape == (), name
            assert term.value.isfinite(), name
        for name, parameter in method.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                assert parameter.grad.isfinite().all(), name
            else:
                assert parameter.grad is None, name
        for net in method.inference_nets:
            assert any(p.grad is not None and p.grad.any() for p in method.get_submodule(net).parameters()), net

    def has_the_same_terms_at_every_step(self) -> None:
        """A captured step is one graph: terms may not depend on progress."""
        method, batch = self.build(), make_batch(self.method)
        steps = [self.run(method, batch, progress) for progress in (0.0, 1.0)]
        assert steps[0].keys() == steps[1].keys()
        assert all(sum_terms(terms).isfinite() for terms in steps)

    def is_finite_without_scribbles(self) -> None:
        method = self.build()
        terms = self.run(method, make_batch(self.method, scribbled=False))
        assert sum_terms(terms).isfinite()
        assert all(p.grad is None or p.grad.isfinite().all() for p in method.parameters())

    def is_reproducible_and_restores_its_state(self) -> None:
        first, second = self.build(), self.build()
        batches = [make_batch(self.method, seed) for seed in range(2)]
        same_terms(self.run(first, batches[0]), self.run(second, batches[0]))
        same_tensors(first.state_dict(), second.state_dict())
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        loaded = self.build(seed=1)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        same_terms(self.run(first, batches[1], seed=5), self.run(loaded, batches[1], seed=5))
        same_tensors(first.state_dict(), loaded.state_dict())

    def never_waits_for_the_device(self, no_sync: NoSync) -> None:
        method, batch = self.build(), make_batch(self.method)
        progress, generator = torch.full((), 0.5), torch.Generator().manual_seed(0)
        with no_sync():
            terms = method.step(batch, progress, generator)
            sum_terms(terms).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                method.update(progress)

    def runs_in_low_precision(self) -> None:
        method = self.build()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            terms = method.step(make_batch(self.method), torch.full((), 0.5), torch.Generator().manual_seed(0))
        assert all(term.value.isfinite() for term in terms.values())
        assert all(term.value.dtype == torch.float32 for term in terms.values())

    def predicts_with_each_of_its_inference_nets(self) -> None:
        method, image = self.build(), make_batch(self.method).image
        outputs = method(image)
        assert outputs[0].shape == (len(image), CLASSES, SIDE, SIDE)
        for name in method.inference_nets:
            net = method.get_submodule(name)
            assert isinstance(net, Segmenter)
            alone = build_segmenter(self.net, 1, CLASSES)
            alone.load_state_dict(net.state_dict())
            with torch.no_grad():
                torch.testing.assert_close(alone.eval()(image), net.eval()(image))

    def accepts_unaugmented_batches(self) -> None:
        terms = self.run(self.build(), replace(make_batch(self.method), theta=None))
        assert sum_terms(terms).isfinite()


def same_terms(one: Terms, other: Terms) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name].value, other[name].value), name


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture
def contract() -> Callable[[str, type[Method], str], Contract]:
    """A contract to hold a method to: contract(name, class, net)."""
    return Contract


@pytest.fixture
def batch_for() -> Callable[..., Batch]:
    return make_batch

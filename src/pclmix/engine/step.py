"""One training step, from a batch in buffers to updated weights, with nothing in it that waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pclmix.config import Config
from pclmix.data.augment import augment
from pclmix.data.batch import Batch
from pclmix.data.hull import draw, mark
from pclmix.distributed import average_gradients, gather_objects
from pclmix.engine.cast import cast_weights
from pclmix.engine.feed import Feed
from pclmix.engine.optim import Optimizer, WeightAverage, learning_rate
from pclmix.errors import PclmixError
from pclmix.methods.base import Method, sum_terms

_WAY_OUT = (
    "The last good checkpoint is kept, where there is one; "
    "lower optim.lr, set optim.clip=1 or use engine.precision=32, then start again"
)
_WARM_UP = 3  # eager steps before capture: what is made when first needed (workspaces, kernels) must exist by then


class DivergedError(PclmixError):
    """The loss or the weights are not finite any more; raised on all ranks together."""


class TrainStep:
    """Calls `_body` eagerly or, on one CUDA device, replays it as one captured graph."""

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        average: WeightAverage | None,
        feed: Feed,
        maps: tuple[str, ...],
        config: Config,
        generator: torch.Generator,
        graph: bool,
        shares: Mapping[int, float] | None = None,
    ) -> None:
        """`shares`: of the pixels that hulls of strokes speak of, by class (see hull.py)."""
        self.method, self.optimizer, self.average, self.feed = method, optimizer, average, feed
        self.maps, self.config, self.generator, self.shares = maps, config, generator, shares
        device = feed.device
        self.parameters = [p for p in method.parameters() if p.requires_grad]
        self.progress = torch.zeros((), device=device)
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.names: tuple[str, ...] = ()
        self.values = torch.zeros(0, device=device)
        self.bad_terms = torch.zeros(0, dtype=torch.bool, device=device)
        self._run: Callable[[], None] = _Graphed(self._body, generator) if graph else self._body

    def __call__(self, step: int, progress: float) -> None:
        """Train on the batch of `step`, counted from 0, at `progress` = t/T."""
        self.feed.fill(step)
        self.progress.fill_(progress)
        self.number.fill_(step + 1)
        self.optimizer.set_learning_rate(learning_rate(progress, self.config.optim))
        self._run()
        if self.average is not None:
            self.average.count()

    def _body(self) -> None:
        names, values = self.backward()
        average_gradients(self.parameters)
        if self.config.optim.clip > 0:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip, foreach=True)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        with torch.no_grad():
            self.method.update(self.progress)
            self._note(names, values)

    def backward(self) -> tuple[tuple[str, ...], list[Tensor]]:
        """Gradients of the batch in the feed's buffers; the names and values of the loss and its terms."""
        config, device = self.config, self.feed.device
        labels = mark(self.feed.label, self.shares) if self.shares else self.feed.label
        image, labels, theta = augment(self.feed.image, labels, config.augment, self.generator)
        if config.engine.channels_last:
            image = image.contiguous(memory_format=torch.channels_last)
        maps = {name: labels[:, 1 + m] for m, name in enumerate(self.maps)}
        label = labels[:, 0]
        if self.shares:
            label = draw(label, labels[:, -1], self.shares, self.generator)
        batch = Batch(image, label, self.feed.index, maps, theta)
        for parameter in self.parameters:
            parameter.grad = None
        bf16 = config.engine.precision == "bf16"
        # The autocast cache would keep casts made in one replay for the next; inside a graph it must be off.
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False)
        with autocast, cast_weights(self.method, torch.bfloat16) if bf16 else nullcontext():
            terms = self.method.step(batch, self.progress, self.generator)
        loss = sum_terms(terms)
        loss.backward()  # type: ignore[no-untyped-call]
        values = [loss.detach(), *(term.value.detach() for term in terms.values())]
        return ("loss", *(f"loss/{name}" for name in terms)), values

    def _note(self, names: tuple[str, ...], values: list[Tensor]) -> None:
        """Keep this step's values, and the first step at which one of them was not finite, on the device."""
        self.values = torch.stack([v.detach().float() for v in values])
        if names != self.names:
            self.names = names
            self.bad_terms = torch.zeros(len(names), dtype=torch.bool, device=self.feed.device)
        bad = ~torch.isfinite(self.values)
        first = bad.any() & (self.bad_step < 0)
        self.bad_terms.copy_(torch.where(first, bad, self.bad_terms))
        self.bad_step.copy_(torch.where(first, self.number, self.bad_step))

    def read(self) -> dict[str, float]:
        """The last step's loss and terms; waits for the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))

    def require_finite(self) -> None:
        """Refuse to go on after a loss that is not a number; names the step and the terms.

        Waits for the device, and for all ranks: what one has in its loss is in everybody's weights.
        """
        own = [n for n, bad in zip(self.names, self.bad_terms.tolist(), strict=True) if bad]
        found = [(step, terms) for step, terms in gather_objects((int(self.bad_step), own)) if step >= 0]
        if found:
            step, terms = min(found)
            named = ", ".join(n.removeprefix("loss/") for n in terms if n != "loss") or "the gradient of all terms"
            raise DivergedError(f"the loss became NaN or infinite at step {step}, in: {named}. {_WAY_OUT}")

    def require_finite_weights(self, step: int) -> None:
        """Refuse to save weights that are not finite: a finite loss can have a gradient that is not."""
        finite = [torch.isfinite(tensor).all() for tensor in self.method.parameters()]
        if not bool(torch.stack(finite).all()):
            raise DivergedError(f"weights are NaN or infinite after step {step}, while the loss is not. {_WAY_OUT}")


class _Graphed:
    """The step as one CUDA graph: the first calls run eagerly, then it is captured once and replayed."""

    def __init__(self, body: Callable[[], None], generator: torch.Generator) -> None:
        self.body, self.generator = body, generator
        self.calls = 0
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self) -> None:
        if self.calls < _WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.body()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            if self.calls == _WARM_UP:
                self.graph.register_generator_state(self.generator)
                with torch.cuda.graph(self.graph):
                    self.body()
            self.graph.replay()
        self.calls += 1

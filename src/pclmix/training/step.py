"""One training step, from a batch in buffers to updated weights, without host synchronisation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pclmix.config import Config
from pclmix.data.batch import Batch, Mixed, augment, draw_outside, mark_outside
from pclmix.errors import PclmixError
from pclmix.methods.base import Method, sum_terms
from pclmix.training.feed import Feed
from pclmix.training.optim import WeightAverage, learning_rate, set_learning_rate
from pclmix.training.parallel import gather_objects, mean

#: Layers that autocast runs in low precision.
_CAST = (nn.Conv2d, nn.Linear)


@contextmanager
def cast_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the trainable convolutions and linear layers of `module` use weights and biases in `dtype`.

    Gradients reach the parameters in their own type; parameters() and state_dict() are unchanged. Unused weights have
    no gradient. A module that declares `full_precision` keeps its weights, and so do its children.
    """
    owners = [
        (layer, name)
        for layer in _layers(module)
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    weights = [getattr(layer, name) for layer, name in owners]
    copies: tuple[Tensor, ...] = _Cast.apply(dtype, *weights) if weights else ()  # type: ignore[no-untyped-call]
    for (layer, name), copy in zip(owners, copies, strict=True):
        # An attribute in the instance's dictionary takes precedence over nn.Module's parameters.
        layer.__dict__[name] = copy
    try:
        yield
    finally:
        for layer, name in owners:
            del layer.__dict__[name]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    if getattr(module, "full_precision", False):
        return
    if isinstance(module, _CAST):
        yield module
    for child in module.children():
        yield from _layers(child)


class _Cast(torch.autograd.Function):
    """Cast many tensors, and their gradients back, each with one multi-tensor copy."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.weights = [(weight.dtype, weight.shape, weight.stride(), weight.device) for weight in weights]
        copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(copies, weights)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        result: list[Tensor | None] = [
            None if g is None else torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for g, (dtype, shape, stride, device) in zip(gradients, ctx.weights, strict=True)
        ]
        torch._foreach_copy_([r for r in result if r is not None], [g for g in gradients if g is not None])
        return None, *result


_WAY_OUT = (
    "The last good checkpoint is kept, where there is one; "
    "lower optim.lr, set optim.clip=1 or use engine.precision=32, then start again"
)
#: Eager steps before the capture, which create workspaces and kernels. DistributedDataParallel rebuilds its buckets and
#: times its first ten iterations, which cannot be captured.
_WARM_UP, _WARM_UP_DISTRIBUTED = 3, 11
log = logging.getLogger(__name__)


class DivergedError(PclmixError):
    """The loss or the weights are not finite any more; raised on all ranks together."""


class Loss(nn.Module):
    """A method's step as a forward pass, for DistributedDataParallel."""

    def __init__(self, method: Method, precision: str) -> None:
        super().__init__()
        self.method, self.bf16 = method, precision == "bf16"

    def forward(self, batch: Batch, progress: Tensor, generator: Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the value of each of its terms by name."""
        # The autocast cache must be off in a graph: it would keep casts from one replay to the next.
        autocast = torch.autocast(batch.image.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)
        with autocast, cast_weights(self.method, torch.bfloat16) if self.bf16 else nullcontext():
            terms = self.method.step(batch, progress, generator)
        return sum_terms(terms), {name: term.value for name, term in terms.items()}


class Gradients:
    """Loss and gradients of the batch in the feed's buffers."""

    def __init__(
        self,
        method: Method,
        feed: Feed,
        config: Config,
        generator: Generator,
        ring: int | None = None,
        mixed: Mixed | None = None,
    ) -> None:
        """`ring` is the class whose strokes surround all others, if the dataset states one.

        `mixed` says which labels may be used where cases are annotated in different ways.
        """
        self.mixed = mixed
        self.ring = ring if config.data.ring_share > 0 else None
        self.method, self.feed, self.config, self.generator = method, feed, config, generator
        self.parameters = [p for p in method.parameters() if p.requires_grad]
        self.progress = torch.zeros((), device=feed.device)  #: t/T
        self.distributed = False
        #: The stream of work that is captured later; None on a CPU.
        self.stream = torch.cuda.Stream() if feed.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._loss: nn.Module = Loss(method, config.engine.precision)

    def average_over_ranks(self) -> None:
        """Broadcast the weights of rank 0; from now on every rank has the gradients of the whole batch.

        The autograd graph is fixed, so it is declared static and unused parameters need no search. Buffers are not
        broadcast: all ranks compute the same ones from statistics, prototypes and predictions gathered over ranks.
        """
        # The name since torch 2.13.
        known = signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {name: False, "gradient_as_bucket_view": True, "static_graph": True}
        with _on(self.stream):  # required for the later capture
            self._loss = DistributedDataParallel(self._loss, **options)
        self.distributed = True

    def __call__(self) -> dict[str, Tensor]:
        """Compute the gradients; returns the values of the loss and its terms."""
        config = self.config
        labels = self.feed.label if self.ring is None else mark_outside(self.feed.label, self.ring)
        image, labels, theta = augment(self.feed.image, labels, config.augment, self.generator)
        image = image.contiguous(memory_format=torch.channels_last)
        maps = {name: labels[:, 1 + m] for m, name in enumerate(self.feed.maps)}
        label = labels[:, 0]
        if self.mixed is not None:
            label = self.mixed.labels(label, self.feed.index, self.generator)
        if self.ring is not None:
            marked = labels[:, -1] if self.mixed is None else self.mixed.guesses(labels[:, -1], self.feed.index)
            label = draw_outside(label, marked, config.data.ring_share, self.generator)
        batch = Batch(image, label, self.feed.index, maps, theta)
        for parameter in self.parameters:
            parameter.grad = None
        loss, terms = self._loss(batch, self.progress, self.generator)
        loss.backward()
        return {"loss": loss.detach(), **{f"loss/{name}": value.detach() for name, value in terms.items()}}


class TrainStep:
    """Gradients, update, weight average and the method's own update; on CUDA replayed as one captured graph."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        graph: bool = False,
    ) -> None:
        self.gradients, self.optimizer, self.average = gradients, optimizer, average
        self.method, self.feed, self.config = gradients.method, gradients.feed, gradients.config
        device = self.feed.device
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.names: tuple[str, ...] = ()
        self.values = torch.zeros(0, device=device)
        self.bad_terms = torch.zeros(0, dtype=torch.bool, device=device)
        self._run: Callable[[], None] = _Graphed(self._body, gradients) if graph else self._body

    def __call__(self, step: int, progress: float) -> None:
        """Train on the batch of `step`, counted from 0, at `progress` = t/T."""
        self.feed.fill(step)
        self.gradients.progress.fill_(progress)
        self.number.fill_(step + 1)
        set_learning_rate(self.optimizer, learning_rate(progress, self.config.optim))
        self._run()
        if self.average is not None:
            self.average.count()

    def close(self) -> None:
        """Free the captured graph and all references; no steps may follow.

        Explicit, since destroying a process group waits for all graphs that hold its collectives.
        """
        run = vars(self).get("_run")
        if isinstance(run, _Graphed):
            run.graph.reset()
        vars(self).clear()

    def _body(self) -> None:
        values = self.gradients()
        if self.config.optim.clip > 0:
            nn.utils.clip_grad_norm_(self.gradients.parameters, self.config.optim.clip, foreach=True)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        with torch.no_grad():
            self.method.update(self.gradients.progress)
            self._note(values)

    def _note(self, values: dict[str, Tensor]) -> None:
        """Keep the values of this step and the first non-finite step, on the device."""
        self.values = torch.stack([value.float() for value in values.values()])
        if tuple(values) != self.names:
            self.names = tuple(values)
            self.bad_terms = torch.zeros(len(values), dtype=torch.bool, device=self.feed.device)
        bad = ~torch.isfinite(self.values)
        first = bad.any() & (self.bad_step < 0)
        self.bad_terms.copy_(torch.where(first, bad, self.bad_terms))
        self.bad_step.copy_(torch.where(first, self.number, self.bad_step))

    def read(self) -> dict[str, float]:
        """The last step's loss and terms, averaged over ranks; waits for the device and for all ranks."""
        return dict(zip(self.names, mean(self.values.tolist()), strict=True))

    def require_finite(self) -> None:
        """Raise if the loss has become NaN or infinite; names the step and the terms.

        Waits for the device and for all ranks.
        """
        own = [n for n, bad in zip(self.names, self.bad_terms.tolist(), strict=True) if bad]
        found = [(step, terms) for step, terms in gather_objects((int(self.bad_step), own)) if step >= 0]
        if found:
            step, terms = min(found)
            named = ", ".join(n.removeprefix("loss/") for n in terms if n != "loss") or "the gradient of all terms"
            raise DivergedError(f"the loss became NaN or infinite at step {step}, in: {named}. {_WAY_OUT}")

    def require_finite_weights(self, step: int) -> None:
        """Refuse to save weights that are not finite: a finite loss can have a non-finite gradient."""
        finite = [torch.isfinite(tensor).all() for tensor in self.method.parameters()]
        if not bool(torch.stack(finite).all()):
            raise DivergedError(f"weights are NaN or infinite after step {step}, while the loss is not. {_WAY_OUT}")


class _Graphed:
    """The step as one CUDA graph: the first calls run eagerly, then it is captured once and replayed.

    All work is on the stream on which DistributedDataParallel created its autograd nodes: nodes of another stream would
    add that stream to the capture. With several ranks the graph includes NCCL's collectives.
    """

    def __init__(self, body: Callable[[], None], gradients: Gradients) -> None:
        self.body, self.generator, self.stream = body, gradients.generator, gradients.stream
        self.calls, self.warm_up = 0, _WARM_UP_DISTRIBUTED if gradients.distributed else _WARM_UP
        # With NCCL, CUDA calls of other threads must not invalidate the capture.
        self.mode = "thread_local" if gradients.distributed else "global"
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self) -> None:
        if self.calls < self.warm_up:
            with _on(self.stream):
                self.body()
        else:
            if self.calls == self.warm_up:
                self.graph.register_generator_state(self.generator)
                with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode=self.mode):
                    self.body()
                log.info("the step is one CUDA graph after %d eager ones", self.calls)
            self.graph.replay()
        self.calls += 1


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Inside, CUDA work runs on `stream`, ordered with the work before and after; None: the current stream."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)

"""Checkpoints as predictors: the network on a device, from prepared slices to labels without synchronising."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pclmix.data.patches import gaussian, slide
from pclmix.data.preprocess import FLIPS
from pclmix.errors import PclmixError
from pclmix.inference.predictor import SCORES_AT_ONCE, TTA, About, Array, Predictor, Wanted
from pclmix.nets.segmenter import fold_batchnorm

#: Slices at once by default: enough to fill a GPU; on a CPU larger ones only cost cache.
BATCH = {"cuda": 32, "cpu": 4}
_GRAPH_STEP = 4  # batches are filled up to a multiple of this, so that few graphs serve all volumes


@dataclass(frozen=True)
class SecondDecoder:
    """The transformer decoder of a PCLMix checkpoint, built when an uncertainty is first computed."""

    build: Callable[[], nn.Module]
    lambda_t: float  #: its weight in equation 6
    temperature: float = 1.0  #: of both decoders' logits in equation 6


class TorchPredictor(Predictor):
    """A network in torch. On CUDA it is captured as a graph for each size of batch, unless `graph` is off."""

    def __init__(
        self,
        about: About,
        net: nn.Module,
        device: torch.device,
        *,
        bf16: bool = False,
        batch: int = 4,
        graph: bool = True,
        second: SecondDecoder | None = None,
    ) -> None:
        """The predictor owns `net`: its BatchNorm is folded in place."""
        super().__init__(about, batch)
        self.device = device
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.net = fold_batchnorm(net).to(device, self.dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.second = second
        self._aux: nn.Module | None = None
        self._graphs: _Graphs | None = _Graphs(self._network, batch) if graph and device.type == "cuda" else None
        self._matrices: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, on {self.device}>"

    def _run(self, batches: Iterable[Array], size: tuple[int, int], tta: TTA, wanted: Wanted) -> Iterator[Array]:
        # Two batches are queued: the host prepares the next one and reads the previous one while the device computes.
        queued: deque[tuple[Tensor, Any]] = deque()
        for batch in batches:
            try:
                queued.append(self._to_host(self.compute(self._to_device(batch), size, tta, wanted)))
            except torch.OutOfMemoryError as error:
                raise PclmixError(
                    f"the device's memory does not hold {len(batch)} slices at once; use a smaller --batch than "
                    f"{self.batch}, or --device cpu"
                ) from error
            if len(queued) > 2:
                yield _arrived(*queued.popleft())
        while queued:
            yield _arrived(*queued.popleft())

    @torch.inference_mode()
    def compute(self, slices: Tensor, size: tuple[int, int], tta: TTA = "none", wanted: Wanted = "labels") -> Tensor:
        """Prepared slices (B, C, h, w) on the device to labels (B, H, W) or scores (B, K, H, W); never synchronises."""
        if tta == "flip":
            views = [self._softmax(self._forward(slices.flip(axes)).float()).flip(axes) for axes in FLIPS]
            scores = torch.stack(views).mean(0)
        else:
            scores = self._forward(slices).float()
        count, classes = scores.shape[:2]
        # Labels need scores at native size for a moment only; a few slices at a time keep that moment small.
        few = max(1, SCORES_AT_ONCE // (classes * size[0] * size[1])) if wanted == "labels" else count
        parts = [self._finish(part, size, tta, wanted) for part in torch.split(scores, few)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish(self, scores: Tensor, size: tuple[int, int], tta: TTA, wanted: Wanted) -> Tensor:
        scores = self._resize(scores, size)
        if wanted == "labels":
            return scores.argmax(1).to(torch.uint8 if scores.shape[1] <= 256 else torch.int16)
        # Resizing probabilities keeps their sum: the rows of the matrices sum to one.
        return scores if wanted == "logits" or tta == "flip" else self._softmax(scores)

    def _softmax(self, logits: Tensor) -> Tensor:
        return (logits / self.about.temperature).softmax(1)

    def uncertain_batches(
        self, batches: Iterable[Array], size: tuple[int, int], tta: TTA = "none"
    ) -> Iterator[tuple[Array, Array]]:
        if self.second is None:
            yield from super().uncertain_batches(batches, size, tta)
            return
        for batch in self.few(batches, size):
            labels, q = self._both(self._to_device(batch), size, tta)
            yield labels.cpu().numpy(), q.cpu().numpy()

    @torch.inference_mode()
    def _both(self, slices: Tensor, size: tuple[int, int], tta: TTA) -> tuple[Tensor, Tensor]:
        """Labels of the CNN decoder (B, H, W), and q of equation 6 (B, K, H, W)."""
        if tta == "flip":
            views = []
            for axes in FLIPS:
                logits_c, logits_t = self.both_logits(slices.flip(axes))
                views.append([p.flip(axes) for p in (self._softmax(logits_c), self._mean(logits_c, logits_t))])
            p_c, q = (self._resize(torch.stack(parts).mean(0), size) for parts in zip(*views, strict=True))
            return self._finish(p_c, size, tta, "labels"), q
        logits_c, logits_t = (self._resize(logits, size) for logits in self.both_logits(slices))
        return self._finish(logits_c, size, tta, "labels"), self._mean(logits_c, logits_t)

    def _mean(self, logits_c: Tensor, logits_t: Tensor) -> Tensor:
        """Equation 6 with calibrated probabilities."""
        assert self.second is not None
        p_c, p_t = ((logits / self.second.temperature).softmax(1) for logits in (logits_c, logits_t))
        return torch.lerp(p_c, p_t, self.second.lambda_t)

    def both_logits(self, slices: Tensor) -> tuple[Tensor, Tensor]:
        """Equation 2 before the softmax: logits (B, K, h, w) of the CNN and of the transformer decoder, float32."""
        assert self.second is not None
        if self.about.patch is not None:
            # Both through one window: a network of twice the classes.
            scores = self._slide(lambda part: torch.cat(self._both_decoders(part), dim=1), slices)
            logits_c, logits_t = scores.chunk(2, dim=1)
            return logits_c, logits_t
        return self._both_decoders(slices)

    def _both_decoders(self, slices: Tensor) -> tuple[Tensor, Tensor]:
        assert self.second is not None
        if self._aux is None:
            self._aux = self.second.build().to(self.device)
        net: Any = self.net
        features = net.features(slices.to(self.dtype, memory_format=torch.channels_last))
        return net.decode(features).float(), self._aux([feature.float() for feature in features]).float()

    @torch.inference_mode()
    def native_logits(self, array: Array) -> tuple[Array, ...]:
        """Logits (Z, K, H, W) of each decoder there is, for an image (C, Z, H, W)."""
        if self.second is None:
            return (self.logits(array),)
        size = (array.shape[2], array.shape[3])
        parts = []
        for batch in self.batches(array):
            parts.append([self._resize(x, size).cpu().numpy() for x in self.both_logits(self._to_device(batch))])
        return tuple(np.concatenate(one) for one in zip(*parts, strict=True))

    def _resize(self, scores: Tensor, size: tuple[int, int]) -> Tensor:
        """Scores (B, K, h, w) to (B, K, H, W) as R_h @ scores @ R_w^T."""
        if tuple(scores.shape[-2:]) == tuple(size):
            return scores
        rows, columns = self._restoring(size)
        return rows @ (scores @ columns.T)

    def _restoring(self, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        known = self._matrices.get(size)
        if known is None:
            if len(self._matrices) > 64:
                self._matrices.clear()
            rows, columns = self.about.preprocessing.restoring_matrices(size)
            known = torch.from_numpy(rows).to(self.device), torch.from_numpy(columns).to(self.device)
            self._matrices[size] = known
        return known

    def _forward(self, slices: Tensor) -> Tensor:
        network = self._network if self._graphs is None else self._graphs
        return network(slices) if self.about.patch is None else self._slide(network, slices)

    def _slide(self, network: Callable[[Tensor], Tensor], slices: Tensor) -> Tensor:
        """Float32 logits of slices larger than what the network sees."""
        assert self.about.patch is not None
        zeros = partial(torch.zeros, device=self.device)
        weight = torch.tensor(gaussian(self.about.patch), device=self.device)
        scores: Tensor = slide(lambda part: network(part).float(), slices, self.about.patch, zeros, weight)
        return scores

    def _network(self, slices: Tensor) -> Tensor:
        logits: Tensor = self.net(slices.to(self.dtype, memory_format=torch.channels_last))
        return logits

    def _to_device(self, batch: Array) -> Tensor:
        tensor = torch.from_numpy(batch)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _to_host(self, result: Tensor) -> tuple[Tensor, Any]:
        """Start the copy to the host; the event says when it has arrived."""
        if self.device.type == "cpu":
            return result, None
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        host.copy_(result, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return host, event


def _arrived(host: Tensor, event: Any) -> Array:
    if event is not None:
        event.synchronize()
    array: Array = np.asarray(host.numpy())
    return array


class _Graphs:
    """One captured graph for each size of batch: an eager ResNet-50 is bound by launching its kernels."""

    def __init__(self, network: Any, largest: int) -> None:
        self.network, self.largest = network, largest
        self.pool: Any = None
        self.known: dict[tuple[int, ...], tuple[Any, Tensor, Tensor]] = {}

    def __call__(self, slices: Tensor) -> Tensor:
        """Logits of `slices`; to be read before the next call, which writes to the same memory."""
        count = len(slices)
        shape = (max(count, min(self.largest, -(-count // _GRAPH_STEP) * _GRAPH_STEP)), *slices.shape[1:])
        if shape not in self.known:
            self.known[shape] = self._capture(slices, shape)
        graph, inputs, outputs = self.known[shape]
        inputs[:count].copy_(slices)
        graph.replay()
        return outputs[:count]

    def _capture(self, slices: Tensor, shape: tuple[int, ...]) -> tuple[Any, Tensor, Tensor]:
        inputs = slices.new_zeros(shape)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.network(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = self.network(inputs)
        self.pool = self.pool or graph.pool()
        return graph, inputs, outputs

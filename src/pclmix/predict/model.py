"""Checkpoints as predictors: the network on a device, from prepared slices to labels with no wait in between."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pclmix.data.volume import ending_of
from pclmix.device import device_kind
from pclmix.engine.checkpoint import build_net, inference_state, open_model
from pclmix.errors import PclmixError
from pclmix.files import read_json
from pclmix.labels import Labels
from pclmix.nets.ensemble import Ensemble
from pclmix.nets.fold import fold_batchnorm
from pclmix.predict.base import FLIPS, SCORES_AT_ONCE, TTA, About, Array, Precision, Predictor, Wanted
from pclmix.resize import linear_matrix

#: Slices at once where nobody says: enough to fill a GPU; on a CPU larger ones only cost cache.
BATCH = {"cuda": 32, "cpu": 4}
CALIBRATION = "calibration.json"
ENSEMBLE = "ensemble"
_GRAPH_STEP = 4  # batches are filled up to a multiple of this, so that few graphs serve all volumes
log = logging.getLogger(__name__)


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int | None = None,
    net: str = "net",
    last: bool = False,
    offset: Mapping[str, float] | None = None,
) -> Predictor:
    """The predictor of MODEL: a run folder or a checkpoint. Only encoder and CNN decoder are built.

    `precision` is bf16 on a GPU and 32 on a CPU unless said; `batch` is the number of slices at once. `net` is one of
    the networks that the method trained to predict alone, or `ensemble` for the mean of their probabilities. `last`
    takes the last weights where the run kept an average. `offset`, class: what is added to its score, stands in for the
    run's own.
    """
    path = Path(path)
    place = torch.device(device_kind(device))
    if ending_of(path) and path.is_file():
        raise PclmixError(f"{path} is an image; the model comes first: pclmix predict MODEL INPUT OUT")
    content = replace_offset(open_model(path), offset)
    names = network_names(path, content, net)
    nets = [build_net(content, name, last=last) for name in names]
    return TorchPredictor(
        about_model(path, content, names, last=last),
        nets[0] if len(nets) == 1 else Ensemble(nets),
        place,
        bf16=precision == "bf16" or (precision == "auto" and place.type == "cuda"),
        batch=BATCH[place.type] if batch is None else batch,
    )


def replace_offset(content: dict[str, Any], offset: Mapping[str, float] | None) -> dict[str, Any]:
    """A checkpoint as if it had been trained with this `offset`, where one is given."""
    if offset is None:
        return content
    numbers = offset.values() if isinstance(offset, Mapping) else [None]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
        raise PclmixError(f'offset {offset!r}: classes and finite numbers are needed, such as {{"LV": 1.5}}')
    return {**content, "config": {**content["config"], "offset": dict(offset)}}


def network_names(path: Path, content: dict[str, Any], net: str) -> tuple[str, ...]:
    """The networks of a checkpoint that `net` stands for: one by name, or all of them as an ensemble."""
    if net == "net":
        return (net,)
    from pclmix.methods.base import find_method  # the usual prediction imports no method

    method = content["config"]["method"]
    known = find_method(method).inference_nets
    if len(known) == 1:
        raise PclmixError(f"--net {net}: {path} is a run of {method}, which trains one network; leave --net out")
    if net == ENSEMBLE:
        return known
    if net not in known:
        raise PclmixError(f"--net {net}: {path} is a run of {method}; choose {', '.join(known)} or {ENSEMBLE}")
    return (net,)


def about_model(path: Path, content: dict[str, Any], nets: Sequence[str] = ("net",), *, last: bool = False) -> About:
    """What a checkpoint says of itself, with the temperature that `pclmix calibrate` found for its weights."""
    digest = hashlib.blake2b(digest_size=12)
    for net in nets:
        for name, tensor in sorted(inference_state(content, net, last=last).items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    data, run = content["config"]["data"], content.get("run", {})
    labels = Labels(tuple(content["labels"]["names"]), content["labels"]["ignore"])
    height, width = data["size"]
    return About(
        str(path),
        digest.hexdigest(),
        labels,
        tuple(content["channels"]),
        (height, width),
        data["intensity"],
        str(run.get("dataset", "")),
        tuple(run.get("cases", ())),
        float(read_calibration(path, digest.hexdigest()).get("temperature", 1.0)),
        dict(content["config"].get("offset") or {}),
        bool(content["config"].get("augment", {}).get("quarter_turns", 1)),
    )


def read_calibration(path: Path, identity: str, *, warn: bool = True) -> dict[str, Any]:
    """What `pclmix calibrate` left in the run folder of MODEL for these very weights; empty where it did not."""
    found = (path if path.is_dir() else path.parent) / CALIBRATION
    if not found.is_file():
        return {}
    content = read_json(found)
    if not isinstance(content, dict) or content.get("identity") != identity:
        log.log(
            logging.WARNING if warn else logging.DEBUG,
            "%s is of other weights or another offset and is not used; `pclmix calibrate` makes it for a run's own",
            found,
        )
        return {}
    return content


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
    ) -> None:
        """`net` is taken over: its BatchNorm is folded in place."""
        super().__init__(about, batch)
        self.device = device
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.net = fold_batchnorm(net).to(device, self.dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._graphs: _Graphs | None = _Graphs(self._network, batch) if graph and device.type == "cuda" else None
        self._matrices: dict[tuple[int, int], Tensor] = {}

    def _run(self, batches: Iterable[Array], size: tuple[int, int], tta: TTA, wanted: Wanted) -> Iterator[Array]:
        # Two batches stay in flight: the host prepares the next one and reads the one before while the device works.
        flying: deque[tuple[Tensor, Any]] = deque()
        for batch in batches:
            try:
                flying.append(self._to_host(self.compute(self._to_device(batch), size, tta, wanted)))
            except torch.OutOfMemoryError as error:
                raise PclmixError(
                    f"the device's memory does not hold {len(batch)} slices at once; use a smaller --batch than "
                    f"{self.batch}, or --device cpu"
                ) from error
            if len(flying) > 2:
                yield _arrived(*flying.popleft())
        while flying:
            yield _arrived(*flying.popleft())

    @torch.inference_mode()
    def compute(self, slices: Tensor, size: tuple[int, int], tta: TTA = "none", wanted: Wanted = "labels") -> Tensor:
        """Prepared slices (B, C, h, w) on the device to labels (B, H, W) or scores (B, K, H, W); waits nowhere."""
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

    def _resize(self, scores: Tensor, size: tuple[int, int]) -> Tensor:
        """Scores (B, K, h, w) to (B, K, H, W) as R_h @ scores @ R_w^T."""
        h, w = scores.shape[-2:]
        if w != size[1]:
            scores = scores @ self._matrix(w, size[1]).T
        return self._matrix(h, size[0]) @ scores if h != size[0] else scores

    def _matrix(self, source: int, target: int) -> Tensor:
        known = self._matrices.get((source, target))
        if known is None:
            if len(self._matrices) > 64:
                self._matrices.clear()
            known = torch.from_numpy(linear_matrix(source, target).copy()).to(self.device)
            self._matrices[source, target] = known
        return known

    def _forward(self, slices: Tensor) -> Tensor:
        return self._graphs(slices) if self._graphs is not None else self._network(slices)

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

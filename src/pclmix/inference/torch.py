"""Run folders and checkpoints as predictors: the network on a device, without host synchronisation."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pclmix.data.preprocess import FLIPS, gaussian, slide
from pclmix.errors import PclmixError
from pclmix.inference.predictor import SCORES_AT_ONCE, TTA, About, Array, Precision, Predictor, Wanted, is_temperature
from pclmix.io.files import read_json
from pclmix.io.volume import ending_of
from pclmix.nets.segmenter import Ensemble, Segmenter, check_side, device_kind, fold_batchnorm
from pclmix.training.checkpoint import Checkpoint, build_net, inference_state, load_weights, open_model

#: Default batch: fills a GPU; larger batches are slower on a CPU.
BATCH = {"cuda": 32, "cpu": 4}
_GRAPH_STEP = 4  # batches are padded to a multiple of this, so that few graphs are captured


@dataclass(frozen=True)
class SecondDecoder:
    """The transformer decoder of a PCLMix checkpoint, built for the first uncertainty."""

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
        # Two batches are queued: the host prepares the next and reads the previous one while the device computes.
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
        # Scores at native size are temporary; a few slices at a time bound their memory.
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
            # One sliding window for both, as for a network with twice the classes.
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
        """Float32 logits of slices larger than the patch, by a sliding window."""
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
        """Start the copy to the host; the event marks its end."""
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
    """One captured graph per batch size: an eager ResNet-50 is limited by kernel launches."""

    def __init__(self, network: Any, largest: int) -> None:
        self.network, self.largest = network, largest
        self.pool: Any = None
        self.known: dict[tuple[int, ...], tuple[Any, Tensor, Tensor]] = {}

    def __call__(self, slices: Tensor) -> Tensor:
        """Logits of `slices`, valid until the next call, which reuses the memory."""
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


CALIBRATION = "calibration.json"
ENSEMBLE = "ensemble"
log = logging.getLogger(__name__)


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int | None = None,
    net: str = "net",
    last: bool = False,
) -> TorchPredictor:
    """The predictor of a run folder or a checkpoint; see `pclmix.inference.load`.

    Only encoder and CNN decoder are built. The transformer decoder of a PCLMix checkpoint is built when an uncertainty
    is requested.
    """
    path = Path(path)
    place = torch.device(device_kind(device))
    if ending_of(path) and path.is_file():
        raise PclmixError(f"{path} is an image; the model comes first: pclmix predict MODEL INPUT OUT")
    if (path / "dataset.json").is_file():
        raise PclmixError(f"{path} is a dataset; the model comes first: pclmix predict MODEL INPUT OUT")
    checkpoint = open_model(path)
    if last and checkpoint.is_snapshot and checkpoint.config.engine.ema > 0:
        raise PclmixError(f"{path} is a snapshot, which has the averaged weights only; load the run for the last ones")
    names = network_names(path, checkpoint, net)
    nets = [build_net(checkpoint, name, last=last) for name in names]
    about = about_model(path, checkpoint, names, last=last)
    check_side(*about.seen, nets[0].multiple)
    for one in nets:
        _require_working(path, one, len(about.channels))
    second = None if net != "net" or last else _second_decoder(path, checkpoint, nets[0], about)
    return TorchPredictor(
        about,
        nets[0] if len(nets) == 1 else Ensemble(nets),
        place,
        bf16=precision == "bf16" or (precision == "auto" and place.type == "cuda"),
        batch=BATCH[place.type] if batch is None else batch,
        second=second,
    )


@torch.inference_mode()
def _require_working(path: Path, net: Segmenter, channels: int) -> None:
    """Run the network once on a small image: NaN scores would silently give background everywhere.

    Finite weights are not enough: a variance below 0 gives NaN, and large values overflow.
    """
    side = 2 * net.multiple
    image = torch.linspace(0, 1, channels * side * side).reshape(1, channels, side, side)
    if not bool(torch.isfinite(net(image)).all()):
        raise PclmixError(f"{path} gives NaN or infinite scores: its weights are damaged; train again or use another")


def network_names(path: Path, checkpoint: Checkpoint, net: str) -> tuple[str, ...]:
    """The networks of a checkpoint that `net` stands for: one by name, or all of them as an ensemble."""
    if net == "net":
        return (net,)
    from pclmix.methods.base import find_method  # prediction normally imports no method

    method = checkpoint.settings.method
    known = find_method(method).inference_nets
    if len(known) == 1:
        raise PclmixError(f"--net {net}: {path} is a run of {method}, which trains one network; leave --net out")
    if net == ENSEMBLE:
        return known
    if net not in known:
        raise PclmixError(f"--net {net}: {path} is a run of {method}; choose {', '.join(known)} or {ENSEMBLE}")
    return (net,)


def about_model(path: Path, checkpoint: Checkpoint, nets: Sequence[str] = ("net",), *, last: bool = False) -> About:
    """Description of a checkpoint, with the temperature that `pclmix calibrate` fitted to its weights."""
    digest = hashlib.blake2b(digest_size=12)
    for net in nets:
        for name, tensor in sorted(inference_state(checkpoint, net, last=last).items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return About(
        str(path),
        digest.hexdigest(),
        checkpoint.labels,
        checkpoint.channels,
        checkpoint.config.data.size,
        checkpoint.config.data.intensity,
        checkpoint.run.dataset,
        checkpoint.run.cases,
        float(read_calibration(path, digest.hexdigest()).get("temperature", 1.0)),
        checkpoint.config.data.aspect,
        checkpoint.config.data.patch,
        checkpoint.config.data.window,
    )


def read_calibration(path: Path, identity: str, *, warn: bool = True) -> dict[str, Any]:
    """The calibration.json that `pclmix calibrate` wrote for these weights; empty if none."""
    found = (path if path.is_dir() else path.parent) / CALIBRATION
    if not found.is_file():
        return {}
    content = read_json(found)
    if not isinstance(content, dict) or content.get("identity") != identity:
        log.log(
            logging.WARNING if warn else logging.DEBUG,
            "%s is of other weights and is not used; `pclmix calibrate` makes it for a run's own",
            found,
        )
        return {}
    for key in ("temperature", "mean_temperature"):
        value = content.get(key, 1.0)
        absent = value is None and key == "mean_temperature"  # the model has one decoder
        if not absent and not is_temperature(value):
            raise PclmixError(f"{found}: {key}={value!r} must be a number above 0; run `pclmix calibrate --overwrite`")
    return content


def _second_decoder(path: Path, checkpoint: Checkpoint, net: Segmenter, about: About) -> SecondDecoder | None:
    """The transformer decoder of a PCLMix checkpoint; a snapshot holds the CNN alone."""
    if checkpoint.settings.method != "pclmix" or not any(name.startswith("aux.") for name in checkpoint.method):
        return None
    mean = read_calibration(path, about.identity, warn=False).get("mean_temperature")  # `about_model` has warned
    temperature = 1.0 if mean is None else float(mean)
    values = [_number(path, checkpoint, name) for name in ("lambda_t", "embedding", "swin_width")]
    widths = int(values[1]), int(values[2])
    return SecondDecoder(partial(_build_transformer, net, checkpoint, *widths), values[0], temperature)


def _number(path: Path, checkpoint: Checkpoint, name: str) -> float:
    """A parameter of the method, read without importing the method."""
    value = checkpoint.config.params.get(name)
    if not isinstance(value, int | float):
        raise PclmixError(f"{path}: key 'config.params.{name}': {value!r} is no number; train again or use another")
    return value


def _build_transformer(net: Segmenter, checkpoint: Checkpoint, embedding: int, swin_width: int) -> nn.Module:
    """The transformer decoder with its trained weights, in evaluation mode."""
    from pclmix.nets.swin import build_auxiliary

    aux, _ = build_auxiliary(net, checkpoint.labels.count, embedding, swin_width)
    return load_weights(aux, inference_state(checkpoint, "aux"), checkpoint)

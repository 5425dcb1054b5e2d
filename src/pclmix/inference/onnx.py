"""Exported models as predictors: onnxruntime and NumPy, no torch. The file's metadata describes the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.data.preprocess import FLIPS, gaussian, slide
from pclmix.errors import PclmixError, need_extra
from pclmix.inference.predictor import TTA, About, Array, Predictor, Wanted

INPUT, OUTPUT = "image", "logits"
PREFIX = "pclmix."  #: of the keys in the file's metadata
BATCH = {"cuda": 32, "cpu": 4}
_CUDA = "CUDAExecutionProvider"
_TRIAL = 64  # side of the image for the test run on loading


def load_onnx(path: Path | str, *, device: str = "auto", batch: int | None = None) -> Predictor:
    """The predictor of a file that `pclmix export` wrote."""
    path = Path(path)
    if not path.is_file():
        raise PclmixError(f"{path} does not exist; `pclmix export MODEL {path.name}` makes one")
    session = open_session(path, device)
    about = _about(path, session)
    _require_working(about, session)
    kind = "cuda" if _CUDA in session.get_providers() else "cpu"
    return OnnxPredictor(about, session, BATCH[kind] if batch is None else batch)


def open_session(path: Path, device: str = "auto") -> Any:
    """An onnxruntime session on `device`; on a CPU it uses OMP_NUM_THREADS threads if that is set."""
    onnxruntime = need_extra("onnxruntime", "export", f"{path}: an .onnx model")
    if device not in ("auto", "cpu", "cuda"):
        raise PclmixError(f"--device {device} is not known; use auto, cpu or cuda")
    has_cuda = _CUDA in onnxruntime.get_available_providers()
    if device == "cuda" and not has_cuda:
        raise PclmixError("--device cuda: this onnxruntime has no CUDA; install onnxruntime-gpu or use --device cpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and need not be printed too
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        options.intra_op_num_threads = int(threads)
    providers = [_CUDA] if has_cuda and device != "cpu" else []
    try:
        with redirect_stdout(StringIO()):  # it prints some errors
            return onnxruntime.InferenceSession(str(path), options, providers=[*providers, "CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own exception types
        reason = " ".join(str(error).split())[:200]
        raise PclmixError(f"{path} cannot be run by onnxruntime ({reason}); export the model again") from error


def describe(about: About, version: str, precision: str, card: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Metadata of an exported file: everything a predictor needs besides the network, and the model card."""
    content = {"version": version, "precision": precision, "model": about.identity, "card": card, **about.to_json()}
    return {PREFIX + key: json.dumps(value) for key, value in content.items()}


def read_metadata(path: Path, session: Any) -> dict[str, Any]:
    """The metadata that `describe` wrote, keys without their prefix."""
    try:
        said: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
    except UnicodeDecodeError as error:
        raise PclmixError(f"{path}: its metadata is not text ({error}); export the model again") from error
    if f"{PREFIX}labels" not in said:
        raise PclmixError(f"{path} is an ONNX file, but not one of `pclmix export`: it has no classes in its metadata")
    try:
        return {key.removeprefix(PREFIX): json.loads(v) for key, v in said.items() if key.startswith(PREFIX)}
    except (ValueError, RecursionError) as error:
        raise PclmixError(f"{path}: its metadata is not valid JSON ({error}); export the model again") from error


def _about(path: Path, session: Any) -> About:
    identity = hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
    about = About.from_json(read_metadata(path, session), str(path), identity)
    ends = (session.get_inputs(), session.get_outputs())
    names = [[entry.name for entry in end] for end in ends]
    if names != [[INPUT], [OUTPUT]]:
        raise PclmixError(f"{path} takes {names[0]} and gives {names[1]}, not '{INPUT}' and '{OUTPUT}'; export again")
    found = ends[0][0].shape[1], ends[1][0].shape[1]
    if found != (len(about.channels), about.labels.count):
        raise PclmixError(
            f"{path}: the network has {found[0]} channels and {found[1]} classes, its metadata says "
            f"{len(about.channels)} and {about.labels.count}; was the file edited? Export again"
        )
    return about


def _require_working(about: About, session: Any) -> None:
    """Run the network once on a small image: NaN weights would silently give background everywhere."""
    height, width = (_TRIAL if side % 32 == 0 else side for side in about.seen)
    image = np.random.default_rng(0).random((1, len(about.channels), height, width), dtype=np.float32)
    try:
        logits = session.run([OUTPUT], {INPUT: image})[0]
    except Exception as error:  # onnxruntime raises its own exception types
        reason = " ".join(str(error).split())[:200]
        raise PclmixError(f"{about.source} cannot be run at {height} x {width} ({reason}); export again") from error
    if not np.isfinite(logits).all():
        raise PclmixError(f"{about.source} gives NaN or infinite scores: its weights are damaged; export again")


class OnnxPredictor(Predictor):
    """A network that onnxruntime runs."""

    def __init__(self, about: About, session: Any, batch: int) -> None:
        super().__init__(about, batch)
        self.session = session

    def _run(self, batches: Iterable[Array], size: tuple[int, int], tta: TTA, wanted: Wanted) -> Iterator[Array]:
        for batch in batches:
            scores = self._flipped(batch) if tta == "flip" else self._forward(batch)
            # One slice at a time: scores at native size can be much larger than the network's output.
            native = self.about.preprocessing.restored
            yield np.stack([self._finish(native(one, size), tta, wanted) for one in scores])

    def _forward(self, slices: Array) -> Array:
        """Logits (B, K, h, w) of prepared slices (B, C, h, w)."""
        patch = self.about.patch
        if patch is None:
            return self._network(slices)
        logits: Array = slide(self._network, slices, patch, partial(np.zeros, dtype=np.float32), gaussian(patch))
        return logits

    def _network(self, slices: Array) -> Array:
        logits: Array = self.session.run([OUTPUT], {INPUT: np.ascontiguousarray(slices)})[0]
        return logits

    def _flipped(self, slices: Array) -> Array:
        views = [np.flip(self._softmax(self._forward(np.flip(slices, axes).copy())), axes) for axes in FLIPS]
        mean: Array = np.mean(views, axis=0)
        return mean

    def _finish(self, scores: Array, tta: TTA, wanted: Wanted) -> Array:
        """Labels or scores of one slice from its scores (K, H, W)."""
        if wanted == "labels":
            labels: Array = scores.argmax(0).astype(np.uint8 if len(scores) <= 256 else np.int16)
            return labels
        return scores if wanted == "logits" or tta == "flip" else self._softmax(scores[None])[0]

    def _softmax(self, logits: Array) -> Array:
        scaled = logits / np.float32(self.about.temperature)
        powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        probabilities: Array = powers / powers.sum(axis=1, keepdims=True)
        return probabilities

"""An actor that predicts cases: several calls at once, so that one is read while another is in the network."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pclmix.cluster import carry
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.files import CaseWork, Choices
from pclmix.inference.inputs import Job
from pclmix.inference.predictor import About
from pclmix.io.volume import stem_of

THREADS = 3  #: calls that a worker is in at once: one reads, one has the network, one writes


@dataclass(frozen=True)
class Model:
    """A model of the driver's: its path, its files and a key of their content, and the shelf that has them."""

    path: Path
    key: str
    names: tuple[str, ...]
    shelf: Any  #: an actor that only a node without the model asks
    device: str = "cpu"
    batch: int | None = None
    net: str = "net"
    cores: int = 1


@dataclass(frozen=True)
class Reply:
    """What became of a case; `files` are those it wrote, where the worker does not see OUT."""

    error: str = ""
    needs_content: bool = False  #: the worker cannot read the images: send the case again with their content
    files: carry.Files | None = None


def model_files(path: Path) -> list[Path]:
    """The files that a model consists of: the checkpoint with its calibration, or an exported file."""
    if not path.exists():
        raise PclmixError(f"{path} does not exist; MODEL is a run folder, a checkpoint or an exported .onnx file")
    if path.suffix.lower() == ".onnx":
        return [path]
    from pclmix.inference.checkpoint import CALIBRATION
    from pclmix.training.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(path)
    calibration = checkpoint.parent / CALIBRATION
    return [checkpoint, *([calibration] if calibration.is_file() else [])]


def content_key(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def size_of(image: Path) -> int:
    """Bytes of an image, or of all files of a DICOM series; -1 where it cannot be read."""
    try:
        if image.is_dir():
            return sum(path.stat().st_size for path in image.iterdir() if path.is_file())
        return image.stat().st_size if os.access(image, os.R_OK) else -1
    except OSError:
        return -1


def content_of(job: Job) -> list[carry.Files]:
    """For each image its files: itself and the spacing beside a picture, or a whole series."""
    found = []
    for image in job.images:
        sidecar = image.with_name(f"{stem_of(image)}.json")
        paths = sorted(image.iterdir()) if image.is_dir() else [image, sidecar]
        found.append({path.name: path.read_bytes() for path in paths if path.is_file()})
    return found


class Worker:
    """Holds one predictor. Ray calls `predict` in several threads."""

    def __init__(self, model: Model, choices: Choices, token: str) -> None:
        """`token` is the name of a file in OUT: a worker that sees it writes there, another returns its files."""
        self.model, self.choices, self.token = model, choices, token
        self._work: CaseWork | None = None
        self._loading, self._network = threading.Lock(), threading.Lock()

    def about(self) -> About:
        """What the model says of itself, under the driver's name for it."""
        return replace(self._ready().predictor.about, source=str(self.model.path))

    def predict(self, job: Job, sizes: tuple[int, ...], content: list[carry.Files] | None) -> Reply:
        """Predict one case and write it, or return what was written."""
        seen = all(size_of(image) == size for image, size in zip(job.images, sizes, strict=True))
        if not seen and content is None:
            return Reply(needs_content=True)
        writes = (job.out.parent / self.token).is_file() and os.access(job.out.parent, os.W_OK)
        if seen and writes:
            return Reply(error=self._do(job, job))
        with TemporaryDirectory(prefix="pclmix-") as name:
            scratch = Path(name)
            images = job.images
            if not seen and content is not None:
                images = tuple(
                    _put(scratch / f"in{k}", image, files)
                    for k, (image, files) in enumerate(zip(images, content, strict=True))
                )
            out = job.out if writes else scratch / "out" / job.out.name
            error = self._do(replace(job, images=images, out=out), job)
            if writes or error:
                return Reply(error=error)
            found = sorted(
                (path for path in out.parent.rglob("*") if path.is_file()), key=lambda path: (path == out, str(path))
            )
            return Reply(files={str(path.relative_to(out.parent)): path.read_bytes() for path in found})

    def _do(self, job: Job, asked: Job) -> str:
        """The three steps of a case; empty, or what is wrong with it in terms of the driver's paths."""
        work = self._ready()
        try:
            case = work.read(job)
            with self._network:
                found = work.predict(case)
            work.write(job, found)
        except PclmixError as error:
            text = str(error)
            for here, there in ((job.out, asked.out), *zip(job.images, asked.images, strict=True)):
                text = text.replace(str(here), str(there))
            return text
        return ""

    def _ready(self) -> CaseWork:
        with self._loading:
            if self._work is None:
                self._work = CaseWork(self._load(), self.choices)
            return self._work

    def _load(self) -> Any:
        model = self.model
        single = model.names[0] == model.path.name  # a file, not a run folder
        root = model.path.parent if single else model.path
        try:
            here = content_key([root / name for name in model.names]) == model.key
        except OSError:
            here = False
        path = model.path
        if not here:
            folder = carry.unpack(root.name, model.key, lambda: carry.take(model.shelf))
            path = folder / model.path.name if single else folder
        if model.path.suffix.lower() != ".onnx":
            import torch

            torch.set_num_threads(model.cores)
        try:
            return load(path, device=model.device, batch=model.batch, net=model.net)
        except PclmixError as error:
            raise PclmixError(str(error).replace(str(path), str(model.path))) from error


def _put(folder: Path, image: Path, files: carry.Files) -> Path:
    """Write the files of an image; a series becomes a folder of its name."""
    place = folder if image.name in files else folder / image.name
    carry.write_files(place, files)
    return folder / image.name

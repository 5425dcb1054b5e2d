"""The readers under test: for each, how an input is made from a seed, and how it is read.

A reader must return or raise PclmixError with one short message. What it returns must be usable: a grid of positive,
finite spacings, an image that can be written, shown and predicted.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import mutations as change
import numpy as np

from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry, Volume, decoded_bytes, read_image, read_labels, write_labels

CORPUS = Path(__file__).parent / "corpus"
#: As PCLMIX_MAX_BYTES: an image may unpack to this, and reading it may take 1 GB.
LARGEST = 128 << 20
LONGEST = 3000  #: letters of a message


@dataclass(frozen=True)
class Reader:
    """`mutate(random, name, seed)` gives an input, `read(path, folder)` reads it; `folder` is empty and its own."""

    mutate: Callable[[Random, str, bytes], bytes]
    read: Callable[[Path, Path], object]
    heavy: bool = False  #: needs torch, onnxruntime or a server: left out of short runs by time


def _plain(mutation: change.Mutation) -> Callable[[Random, str, bytes], bytes]:
    return lambda rng, _, data: mutation(rng, data)


def require(good: object, what: str) -> None:
    if not good:
        raise AssertionError(what)


def require_good_message(error: PclmixError) -> None:
    text = str(error)
    require(0 < len(text) <= LONGEST, f"a message of {len(text)} letters")
    require("Traceback" not in text, "a traceback in a message")
    require("weights_only=False" not in text, "advice to load unsafely")


def each(first: Callable[[], object], *others: Callable[[], object]) -> None:
    """Try all steps. The first decides whether an input is accepted; the others may refuse it with a good message."""
    refusal = None
    for step in (first, *others):
        try:
            step()
        except PclmixError as error:
            require_good_message(error)
            refusal = refusal or (error if step is first else None)
    if refusal is not None:
        raise refusal


def require_usable(array: np.ndarray, geometry: Geometry) -> None:
    require(array.shape[1:] == geometry.shape, f"array {array.shape} on the grid {geometry.shape}")
    require(array.size > 0, "no voxels")
    require(all(np.isfinite(s) and s > 0 for s in geometry.spacing), f"spacing {geometry.spacing}")
    require(np.isfinite(geometry.affine).all(), "an affine that is not finite")
    _ = geometry.sform_spacing, geometry.same_grid(geometry)


def _image(path: Path, folder: Path) -> None:
    """Read as image and as labels; show it as the workbench does, and write labels over its grid."""
    found: dict[str, Any] = {}

    def image() -> None:
        found["image"] = read_image(path)
        require_usable(found["image"].array, found["image"].geometry)

    def labels() -> None:
        found["labels"] = read_labels(path)
        require_usable(found["labels"][0][None], found["labels"][1])

    each(image, labels, partial(decoded_bytes, path))
    volume: Volume = found["image"]
    if volume.array.size < 1 << 16:
        _show(path, volume, folder)


def _show(path: Path, volume: Volume, folder: Path) -> None:
    from pclmix.web.cases import _draw, display_nifti

    display_nifti(volume.array[0], volume.geometry)
    _draw(path)
    zeros = np.zeros(volume.geometry.shape, np.uint8)
    write_labels(folder / "labels.nii.gz", zeros, volume.geometry, ("background", "a"))
    require(read_labels(folder / "labels.nii.gz")[0].shape == zeros.shape, "labels of another shape")


def _dicom(path: Path, folder: Path) -> None:
    """A series of this file alone, one of it and another slice, and both as dropped on the page."""
    from seeds import dicom_slice

    from pclmix.io.dicom import convert_series, read_series
    from pclmix.web.series import Dropped, convert

    alone, two, out = folder / "alone", folder / "two", folder / "out"
    for place in (alone, two, out):
        place.mkdir()
        if place != out:
            shutil.copyfile(path, place / "a.dcm")
    (two / "b.dcm").write_bytes(dicom_slice(2, np.zeros((12, 10))))

    def drop() -> None:
        files = [folder / "dropped0", folder / "dropped1"]
        for file, source in zip(files, (path, two / "b.dcm"), strict=True):
            shutil.copyfile(source, file)
        done = convert([Dropped(file, ("scan",), file.name) for file in files], out, LARGEST)
        require(all(len(note) <= LONGEST for note in done.notes), "a long note")

    def read(place: Path) -> None:
        series = read_series(place)
        require_usable(series.array, series.geometry)

    def export() -> None:
        convert_series(two, folder / "made.nii.gz")
        read_image(folder / "made.nii.gz")

    each(partial(read, alone), partial(read, two), export, drop)


def _nrrd(path: Path, folder: Path) -> None:
    from pclmix.web.labelfiles import decode, read_upload

    geometry = read_image(CORPUS / "nifti" / "int16.nii").geometry
    values, named = read_upload(path, geometry, LARGEST)
    require(values.shape == geometry.shape, "another shape")
    decode(values, _labels(), named, False)


def _labels() -> Any:
    from seeds import LABELS

    return LABELS


def _workspace(folder: Path) -> Any:
    from pclmix.data.dataset import write_dataset_json
    from pclmix.web.workspace import Workspace

    for name in ("imagesTr", "labelsTr"):
        (folder / "set" / name).mkdir(parents=True)
    write_dataset_json(folder / "set", channels=["MRI"], labels=_labels(), ending=".nii.gz", cases=0)
    return Workspace(folder / "set")


def _zip(path: Path, folder: Path) -> None:
    from pclmix.web.archives import Limits
    from pclmix.web.uploads import add

    workspace = _workspace(folder)
    (folder / "in").mkdir()
    shutil.copyfile(path, folder / "in" / "upload")
    before = {p.relative_to(folder) for p in folder.iterdir()}
    try:
        add(workspace, folder / "in" / "upload", "upload.zip", Limits(LARGEST, LARGEST, 50))
    finally:
        require({p.relative_to(folder) for p in folder.iterdir()} == before, "files outside the dataset")
    require(set(workspace.root.iterdir()) >= {workspace.root / "imagesTr"}, "no images folder")


def _yaml(path: Path, folder: Path) -> None:
    from pclmix.config import load_config
    from pclmix.methods.base import require_fitting

    def load(method: str | None, *overrides: str) -> None:
        config = load_config(str(path), method, overrides)
        require_fitting(config)

    shutil.copyfile(path, folder / "config.yaml")
    line = path.read_bytes().decode("utf-8", "replace").strip().splitlines()
    words = [word.strip().replace(": ", "=", 1) for word in line if ":" in word][:3]
    steps = [partial(_own_run, folder), partial(_overridden, words)]
    if b"deviations" in path.read_bytes():
        steps.append(partial(load, "em"))
    each(partial(load, None), *steps)


def _own_run(folder: Path) -> None:
    from pclmix.training.log import read_config
    from pclmix.web.workspace import read_config as read_on_page

    read_on_page(folder)
    read_config(folder)


def _overridden(words: list[str]) -> None:
    from pclmix.config import load_config

    load_config("tiny", None, words)


def command(*arguments: object) -> None:
    """`pclmix ARGUMENTS`: exit code 0, or 2 with one message."""
    import sys

    from pclmix.cli import main

    out, err, before = StringIO(), StringIO(), sys.argv
    sys.argv = ["pclmix", *map(str, arguments)]
    code = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    said = err.getvalue()
    require("Traceback" not in said, "a traceback")
    require(code in (0, 1, 2), f"exit code {code}")
    if code == 2:
        require(said.count("error: ") == 1, f"{said.count('error: ')} messages")
        require(len(said) <= LONGEST, f"a message of {len(said)} letters")
        raise PclmixError(said)


def kept_folder(name: str) -> Path:
    """A temporary folder for as long as this process runs."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _model() -> Path:
    """A run folder that can be loaded."""
    from seeds import register

    register()
    folder = kept_folder("run")
    shutil.copyfile(CORPUS / "checkpoint" / "model.ckpt", folder / "last.ckpt")
    return folder


def _dataset(path: Path, folder: Path) -> None:
    from pclmix.data.dataset import Dataset

    root = _phantom(folder)
    shutil.copyfile(path, root / path.name)

    def read() -> None:
        dataset = Dataset.open(root)
        dataset.splits()
        for case in dataset.cases:
            dataset.read_image(case)
            dataset.read_scribble(case)
            dataset.annotated(case)

    each(read, partial(command, "info", root), partial(command, "split", root), partial(_serve, root))


def _serve(root: Path) -> None:
    from pclmix.web.cases import CaseIndex, classes
    from pclmix.web.workspace import Workspace

    workspace = Workspace(root)
    CaseIndex(workspace).progress()
    classes(workspace.dataset.labels)
    workspace.complete()


def _phantom(folder: Path) -> Path:
    root = folder / "set"
    for name, place, file in (("int16", "imagesTr", "_0000"), ("labels", "labelsTr", "")):
        (root / place).mkdir(parents=True)
        for case in ("phantom001_frame01", "phantom002_frame01"):
            shutil.copyfile(CORPUS / "nifti-gz" / f"{name}.nii.gz", root / place / f"{case}{file}.nii.gz")
    shutil.copyfile(CORPUS / "json" / "dataset.json", root / "dataset.json")
    return root


def _run_file(path: Path, folder: Path) -> None:
    """Files beside a checkpoint."""
    from pclmix.inference import load
    from pclmix.web.workspace import training

    run = folder / "run"
    shutil.copytree(_model(), run)
    shutil.copyfile(path, run / path.name)
    each(
        partial(load, run, device="cpu"),
        partial(command, "info", run),
        partial(command, "status", folder),
        partial(training, run, None),
        partial(training, run, 0.0),
    )


def _compared(path: Path, folder: Path) -> None:
    from pclmix.report.tables import build, markdown, read_runs

    other = folder / "evaluation.json"
    shutil.copyfile(CORPUS / "json" / "evaluation.json", other)
    each(
        partial(read_runs, [f"A={path}"]), lambda: markdown(build(read_runs([f"A={path}", f"B={other}"]), against="A"))
    )


def _study(path: Path, folder: Path) -> None:
    shutil.copyfile(path, folder / "study.json")
    run = folder / "pce-fold1"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    command("status", folder)


def _prediction(path: Path, folder: Path) -> None:
    shutil.copyfile(path, folder / "prediction.json")
    image = CORPUS / "png" / "grey.png"
    (folder / "in").mkdir()
    shutil.copyfile(image, folder / "in" / "x.png")
    command("predict", _model(), folder / "in", folder, "--device", "cpu")


def _spacing(path: Path, folder: Path) -> None:
    shutil.copyfile(CORPUS / "png" / "grey.png", folder / "spacing_0000.png")
    shutil.copyfile(path, folder / "spacing.json")
    volume = read_image(folder / "spacing_0000.png")
    require_usable(volume.array, volume.geometry)
    _show(folder / "spacing_0000.png", volume, folder)


def _quality(path: Path, folder: Path) -> None:
    from pclmix.inference.uncertainty import write_tables

    (folder / "uncertainty").mkdir()
    for name in ("a", "b"):
        source = path if name == "a" else CORPUS / "json" / "quality.json"
        shutil.copyfile(source, folder / "uncertainty" / f"{name}.json")
    write_tables(folder, ("RV", "Myo"))


def _job(path: Path, folder: Path) -> None:
    """The files of a job and of a prediction in a dataset's .pclmix folder, as a server reads them."""
    from pclmix.web.exchange import train_stats
    from pclmix.web.jobs import Jobs
    from pclmix.web.serve import claimed
    from pclmix.web.workspace import PredictionStore, Workspace

    root = _phantom(folder)
    job, run = (root / ".pclmix" / place / "20260101-000000" for place in ("jobs", "runs"))
    kept = root / ".pclmix" / "predictions" / "20260101-000000"
    for place in (job, run, kept):
        place.mkdir(parents=True)
    for name in ("request.json", "outcome.json", "run.json"):
        source = path if path.name == name else CORPUS / "json" / name
        shutil.copyfile(source, (run if name == "run.json" else job) / name)
    (run / "last.ckpt").write_bytes(b"")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n[]\n3\n{"loss": "x"}\n')
    case = "phantom001_frame01"
    shutil.copyfile(path if path.name == "figures.json" else CORPUS / "json" / "figures.json", kept / f"{case}.json")
    if path.name == "server.json":
        shutil.copyfile(path, root / ".pclmix" / "server.json")
    workspace = Workspace(root)
    jobs, store = Jobs(workspace), PredictionStore(workspace)

    def lock() -> None:
        with claimed(workspace), claimed(workspace):
            pass

    each(lambda: json.dumps(train_stats(jobs.state())), jobs.runs, partial(store.of, case))
    if path.name == "server.json":
        try:
            lock()
        except PclmixError as error:
            require_good_message(error)


_JSON: dict[str, Callable[[Path, Path], object]] = {
    "dataset.json": _dataset,
    "splits_final.json": _dataset,
    "evaluation.json": _compared,
    "summary.json": _compared,
    "calibration.json": _run_file,
    "run.json": lambda path, folder: each(partial(_run_file, path, folder), partial(_job, path, folder / "job")),
    "study.json": _study,
    "prediction.json": _prediction,
    "spacing.json": _spacing,
    "quality.json": _quality,
    "request.json": _job,
    "outcome.json": _job,
    "figures.json": _job,
    "server.json": _job,
}


def _json(path: Path, folder: Path) -> None:
    """A JSON file under the name that pclmix gives it; found-NAME-1.json is one too."""
    name = f"{path.stem.removeprefix('found-').partition('-')[0]}.json"
    named = folder / "named" / name
    (folder / "work").mkdir()
    named.parent.mkdir()
    shutil.copyfile(path, named)
    _JSON[name](named, folder / "work")


def _onnx(path: Path, folder: Path) -> None:
    from pclmix.inference import load

    predictor = load(path, device="cpu")
    labels = predictor.predict(np.ones((1, 20, 20), np.float32))
    require(labels.shape == (1, 20, 20), f"labels of shape {labels.shape}")


def of_onnx(rng: Random, data: bytes) -> bytes:
    """Metadata, attributes, initial values and names of a model, or its bytes."""
    import onnx

    if rng.random() < 0.25:
        return change.of_bytes(rng, data)
    model = onnx.load_from_string(data)
    kind = rng.random()
    if kind < 0.7:
        entry = rng.choice(model.metadata_props)
        for _ in range(rng.choice((1, 1, 2))):
            try:
                made = json.dumps(change.tree(rng, json.loads(entry.value)))
            except (ValueError, RecursionError):
                made = rng.choice(change.TEXTS)
            entry.value = made.encode("utf-8", "replace").decode()
            if rng.random() < 0.1:
                entry.key = rng.choice(("pclmix.labels", "pclmix.size", "x"))
            entry = rng.choice(model.metadata_props)
    elif kind < 0.85:
        tensor = rng.choice(model.graph.initializer)
        if rng.random() < 0.3:
            tensor.raw_data = np.float32(rng.choice((np.nan, np.inf, 1e38))).tobytes() * (len(tensor.raw_data) // 4)
        elif rng.random() < 0.3:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.ClearField("raw_data")
            place = tensor.external_data.add()
            place.key, place.value = "location", rng.choice(("/etc/passwd", "../x", "model.onnx", "/dev/zero"))
        elif tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice((0, 1, -1, 5, 10**6, 2**40))
    else:
        node = rng.choice(model.graph.node)
        if node.attribute and rng.random() < 0.5:
            attribute = rng.choice(node.attribute)
            if attribute.ints:
                attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice((0, -1, 2, 1000, 2**31, 2**62))
        elif rng.random() < 0.5 and node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice(("", "image", "x", "logits"))
        else:
            node.op_type = rng.choice(("Relu", "Conv", "Loop", "If", "Resize", "Nothing", "ConstantOfShape"))
    return model.SerializeToString()


def _checkpoint(path: Path, folder: Path) -> None:
    from seeds import register

    from pclmix.inference import load

    register()
    model = folder / "model.ckpt"
    shutil.copyfile(path, model)

    def predict() -> None:
        labels = load(model, device="cpu").predict(np.ones((1, 20, 20), np.float32))
        require(labels.shape == (1, 20, 20), f"labels of shape {labels.shape}")

    predict()


def of_checkpoint(rng: Random, data: bytes) -> bytes:
    """Values of the saved dictionary; else its pickle or its bytes."""
    from io import BytesIO

    import torch

    kind = rng.random()
    if kind < 0.1:
        return change.of_bytes(rng, data)
    if kind < 0.3:
        return change.of_checkpoint_bytes(rng, data)
    content = torch.load(BytesIO(data), weights_only=True)
    for _ in range(rng.choice((1, 1, 2))):
        content = change.tree(rng, content, _tensor_or_value)
    out = BytesIO()
    try:
        torch.save(content, out)
    except Exception:  # a surrogate in a name
        return change.of_bytes(rng, data)
    return out.getvalue()


def _tensor_or_value(rng: Random) -> Any:
    import torch

    if rng.random() < 0.6:
        return change.value(rng)
    shape = rng.choice(((), (0,), (1,), (2, 2), (3, 3, 3, 3), (100,)))
    kind = rng.choice((torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64, torch.float64))
    filled = torch.full(shape, rng.choice((0, 1, 5)), dtype=kind)
    return filled.float() * rng.choice(change.REALS) if rng.random() < 0.3 and not kind.is_complex else filled


def _weights(path: Path, folder: Path) -> None:
    from pclmix.nets.segmenter import build_segmenter
    from pclmix.nets.weights import fitting_net, load_encoder_weights

    encoder = build_segmenter(_small_net(), 1, 4).encoder
    each(partial(load_encoder_weights, encoder, str(path), 1), partial(fitting_net, "resnet50", str(path)))


def _small_net() -> str:
    from seeds import NET, register

    register()
    return NET


def of_weights(rng: Random, data: bytes) -> bytes:
    return of_checkpoint(rng, data) if data[:2] == b"PK" else change.of_safetensors(rng, data)


def _csv(path: Path, folder: Path) -> None:
    _compared(path, folder)


READERS: dict[str, Reader] = {
    "nifti": Reader(_plain(change.of_nifti), _image),
    "nifti-gz": Reader(_plain(change.of_gzip), _image),
    "png": Reader(_plain(change.of_png), _image),
    "bmp": Reader(_plain(change.of_bmp), _image),
    "jpeg": Reader(_plain(change.of_jpeg), _image),
    "tiff": Reader(_plain(change.of_tiff), _image),
    "dicom": Reader(_plain(change.of_dicom), _dicom),
    "nrrd": Reader(_plain(change.of_nrrd), _nrrd),
    "zip": Reader(_plain(change.of_zip), _zip),
    "yaml": Reader(_plain(change.of_yaml), _yaml),
    "json": Reader(_plain(change.of_json), _json),
    "csv": Reader(_plain(change.of_lines), _csv),
    "onnx": Reader(_plain(of_onnx), _onnx, heavy=True),
    "checkpoint": Reader(_plain(of_checkpoint), _checkpoint, heavy=True),
    "weights": Reader(_plain(of_weights), _weights, heavy=True),
}

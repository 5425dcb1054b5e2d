"""Write the corpus of the fuzzer anew: small valid files, made from the phantom.

python tests/fuzz/seeds.py

Files named found-* are inputs that once failed. They are kept.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import zipfile
from functools import partial
from io import BytesIO
from pathlib import Path

import nibabel as nib
import numpy as np
import tifffile
import torch
from PIL import Image
from safetensors.torch import save_file

from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.export.onnx import export_onnx
from pclmix.inference import load
from pclmix.io.volume import read_image, read_labels, write_nrrd
from pclmix.labels import Labels
from pclmix.methods.base import require_fitting
from pclmix.metrics import evaluate
from pclmix.nets.cnn import BASIC, DEPTHS, Depth, ResNetEncoder, UNetDecoder
from pclmix.nets.segmenter import NETS, Net, build_segmenter
from pclmix.synth.phantom import make_phantom
from pclmix.training.checkpoint import Checkpoint, Spacings, TrainedOn

CORPUS = Path(__file__).parent / "corpus"
NET = "smallest"  #: a ResNet of 2 to 4 channels
LABELS = Labels(("background", "RV", "Myo", "LV"), 4)


def register() -> None:
    """Make the network of the corpus known."""
    if NET not in NETS:
        DEPTHS.register(NET)(Depth(BASIC, (1, 1, 1, 1), 1, (2, 2, 2, 4)))
        NETS.register(NET)(Net(partial(ResNetEncoder, NET), UNetDecoder))


def write_checkpoint(path: Path) -> None:
    register()
    torch.manual_seed(0)
    config = load_config("demo", "pce", [f"net={NET}", "data.size=[32,32]"])
    net = build_segmenter(NET, 1, LABELS.count)
    spacing = (8.0, 1.5, 1.5)
    checkpoint = Checkpoint(
        version="1",
        config=config.model_copy(update={"params": require_fitting(config).model_dump(mode="json")}),
        labels=LABELS,
        channels=("MRI",),
        spacing=Spacings(median=spacing, min=spacing, max=spacing),
        run=TrainedOn(dataset="phantom", fold=1, cases=("phantom002_frame01",)),
        step=10,
        seconds=1.0,
        method={f"net.{name}": tensor.clone() for name, tensor in net.state_dict().items()},
    )
    torch.save(checkpoint.to_plain(), path)


def _nifti(array: np.ndarray, kind: type = nib.Nifti1Image, order: str = "<") -> bytes:
    affine = np.array([[0, -1.5, 0, 40], [-1.25, 0, 0, 30], [0, 0, -8, 20], [0, 0, 0, 1]], float)
    header = (nib.Nifti2Header if kind is nib.Nifti2Image else nib.Nifti1Header)(endianness=order)
    header.set_data_dtype(array.dtype)
    return bytes(kind(array, affine, header).to_bytes())


def _pictures(plane: np.ndarray, labels: np.ndarray) -> None:
    colour = np.stack([plane, plane // 2, 255 - plane], -1)
    palette = Image.fromarray(labels)
    palette.putpalette(list(range(48)))
    alpha = np.dstack([colour, np.full_like(plane, 255)])
    for name, image in (
        ("grey", Image.fromarray(plane)),
        ("rgb", Image.fromarray(colour)),
        ("rgba", Image.fromarray(alpha)),
        ("palette", palette),
        ("deep", Image.fromarray(plane.astype(np.uint16) * 100)),
        ("bilevel", Image.fromarray(plane > 100)),
    ):
        image.save(CORPUS / "png" / f"{name}.png")
    for name, image in (("grey", Image.fromarray(plane)), ("rgb", Image.fromarray(colour)), ("palette", palette)):
        image.save(CORPUS / "bmp" / f"{name}.bmp")
    Image.fromarray(plane).save(CORPUS / "jpeg" / "grey.jpg")
    Image.fromarray(colour).save(CORPUS / "jpeg" / "rgb.jpg", progressive=True)
    Image.fromarray(colour).convert("CMYK").save(CORPUS / "jpeg" / "cmyk.jpg")


def _tiffs(volume: np.ndarray) -> None:
    stack, folder = volume[:, :16, :16].astype(np.uint8), CORPUS / "tiff"
    grey = {"photometric": "minisblack"}
    tifffile.imwrite(folder / "stack.tif", stack, **grey)
    tifffile.imwrite(folder / "deflate.tif", stack, compression="zlib", predictor=True, **grey)
    tifffile.imwrite(folder / "big-endian.tif", stack.astype(np.int16), byteorder=">", **grey)
    tifffile.imwrite(folder / "ome.ome.tif", stack, ome=True, **grey)
    tifffile.imwrite(folder / "imagej.tif", stack, imagej=True)
    tifffile.imwrite(folder / "tiled.tif", np.dstack([stack[0]] * 3), tile=(16, 16), photometric="rgb")
    tifffile.imwrite(folder / "float.tif", stack[0].astype(np.float32), bigtiff=True, **grey)
    Image.fromarray(stack[0]).save(folder / "found-lzw.tif", compression="tiff_lzw")
    Image.fromarray(stack[0]).save(folder / "packbits.tif", compression="packbits")


def dicom_slice(number: int, plane: np.ndarray) -> bytes:
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = MRImageStorage, f"1.2.{number + 1}"
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    ds.SOPClassUID, ds.SOPInstanceUID, ds.SeriesInstanceUID = MRImageStorage, meta.MediaStorageSOPInstanceUID, "1.2.9"
    ds.SeriesNumber, ds.SeriesDescription, ds.InstanceNumber = 7, "short axis", number
    ds.ImageOrientationPatient, ds.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0.0, 0.0, 8.0 * number]
    ds.PixelSpacing, ds.SliceThickness, ds.Rows, ds.Columns = [1.25, 1.5], 8.0, *plane.shape
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PixelRepresentation = 1, "MONOCHROME2", 1
    ds.BitsAllocated, ds.BitsStored, ds.HighBit = 16, 16, 15
    ds.RescaleSlope, ds.RescaleIntercept, ds.NumberOfFrames = 1, 0, 1
    ds.PixelData = plane.astype("<i2").tobytes()
    buffer = BytesIO()
    ds.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def _zips(image: bytes, label: bytes, slices: list[bytes]) -> None:
    volumes = {"set/imagesTr/new_0000.nii.gz": image, "set/labelsTr/new.nii.gz": label, "set/notes.txt": b"x"}
    series = {f"scans/heart/{k}.dcm": content for k, content in enumerate(slices)}
    for name, parts in (("volumes", volumes), ("dicom", series)):
        with zipfile.ZipFile(CORPUS / "zip" / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as target:
            for path, content in parts.items():
                target.writestr(path, content)


def _json(root: Path, model: Path) -> None:
    """Every JSON file that pclmix reads."""
    folder = CORPUS / "json"
    about = json.loads((root / "dataset.json").read_text())
    more = {"patient_pattern": "^(?P<patient>[^_]+)_", "not_annotated": {"phantom001_frame01": ["RV"]}, "name": "set"}
    case = {"case": "phantom001_frame01"}
    evaluation = evaluate(root / "referenceTr", root).to_json()
    identity = load(model, device="cpu").about.identity
    settings = {"method": "pce", "recipe": "tiny", "overrides": ["engine.iterations=3"]}
    run = {"variant": "pce", "fold": 1, "settings": settings}
    metrics = {"Dice": 0.9, "n_pred": 3, "n_ref": 4}
    nnunet = {"prediction_file": "a/x.nii.gz", "reference_file": "b/x.nii.gz", "metrics": {"1": metrics, "2": metrics}}
    contents = {
        "dataset.json": {**about, **more},
        "splits_final.json": [
            {"train": [f"phantom00{k}_frame01"], "val": [f"phantom00{3 - k}_frame01"]} for k in (1, 2)
        ],
        "evaluation.json": {**evaluation, "cases": evaluation["cases"][:2], "missing": []},
        "summary.json": {"metric_per_case": [nnunet], "mean": {}, "foreground_mean": {}},
        "calibration.json": {"identity": identity, "temperature": 1.5, "mean_temperature": 1.2},
        "run.json": {"status": "finished", "step": 10, "seconds": 3.5, "fold": 1, "start_from": None},
        "study.json": {
            **{"id": "x", "kind": "crossval", "folder": "study", "dataset": "set", "command": "c", "started_in": "/"},
            "runs": {"pce-fold1": run},
        },
        "prediction.json": {"identity": identity, "tta": "none", "largest_component": False, "labels": {"a": 1}},
        "spacing.json": {"spacing": [8.0, 1.5, 1.5]},
        "quality.json": {
            "certainty": 0.5,
            "dice": [0.5, None],
            "slice_entropy": [0.1],
            "slice_errors": [3.0],
            "pixels": 64,
        },
        "request.json": {
            **{"kind": "train", "method": "pce", "recipe": "tiny", "seconds": 60.0, "then": [case["case"]]},
            **{"run": "20260101-000000", "cases": None, "resume": False, "started": 1.7e9},
        },
        "outcome.json": {"phase": "predicting", "done": 1, "total": 2, "cases": [case["case"]], "status": "failed"},
        "figures.json": {"certainty": 0.5, "expected_dice": 0.5, "agreement": None, "unsure": [0.5], "time": 1.7e9},
        "server.json": {"address": "http://127.0.0.1:8765/", "process": 1},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    evaluate_csv = evaluate(root / "referenceTr", root)
    evaluate_csv.write_csv(CORPUS / "csv" / "cases.csv")
    text = (CORPUS / "csv" / "cases.csv").read_text().splitlines()[:7]
    (CORPUS / "csv" / "cases.csv").write_text("\n".join(text) + "\n")


def _yaml() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    for name in ("tiny", "demo"):
        shutil.copyfile(recipes / f"{name}.yaml", CORPUS / "yaml" / f"{name}.yaml")
    (CORPUS / "yaml" / "own.yaml").write_text(
        "method: pclmix\nnet: resnet18\ndata:\n  size: [64, 64]\n  intensity: window\n  window: [-100, 300]\n"
        "rounds: {count: 2, iterations: 10, augment: {degrees: 5}}\nhabits: {RV: [convex]}\nparams: {lambda_t: 0.5}\n"
        "deviations:\n  pce: &pce [optim.lr=0.1]\n  em: [*pce, params.weight=2]\n"
    )


def main() -> None:
    for kind in ("nifti", "nifti-gz", "png", "bmp", "jpeg", "tiff", "dicom", "nrrd", "zip", "json", "csv", "yaml"):
        (CORPUS / kind).mkdir(parents=True, exist_ok=True)
    for kind in ("onnx", "checkpoint", "weights"):
        (CORPUS / kind).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        make_phantom(root, 2)
        case = Dataset.open(root).cases[0]
        volume = read_image(root / "imagesTr" / f"{case}_0000.nii.gz")
        scribble = read_labels(root / "labelsTr" / f"{case}.nii.gz")[0]
        top = float(volume.array.max())
        grey = (volume.array[0, 2:6, 24:48, 24:44] / top * 255).astype(np.uint8)  # (4, 24, 20)
        labels = np.minimum(scribble[2:6, 24:48, 24:44], 4).astype(np.uint8)
        stored = grey.transpose(2, 1, 0).astype(np.int16) * 4
        files = CORPUS / "nifti"
        (files / "int16.nii").write_bytes(_nifti(stored))
        (files / "big-endian.nii").write_bytes(_nifti(stored[:8, :8], order=">"))
        (files / "second.nii").write_bytes(_nifti(stored[:8, :8].astype(np.float32), nib.Nifti2Image))
        (files / "labels.nii").write_bytes(_nifti(labels.transpose(2, 1, 0)))
        packed = CORPUS / "nifti-gz"
        image, label = (gzip.compress(_nifti(a), mtime=0) for a in (stored, labels.transpose(2, 1, 0)))
        (packed / "int16.nii.gz").write_bytes(image)
        (packed / "labels.nii.gz").write_bytes(label)
        _pictures(grey[1], labels[1])
        _tiffs(grey)
        slices = [dicom_slice(k, plane[:12, :10]) for k, plane in enumerate(grey[:3])]
        (CORPUS / "dicom" / "slice.dcm").write_bytes(slices[1])
        (Path(folder) / "like.nii").write_bytes(_nifti(stored))
        like = read_image(Path(folder) / "like.nii").geometry
        write_nrrd(CORPUS / "nrrd" / "labels.seg.nrrd", np.where(labels > 3, 0, labels), like, LABELS)
        _zips(image, label, slices)
        model = CORPUS / "checkpoint" / "model.ckpt"
        write_checkpoint(model)
        state = build_segmenter(NET, 1, LABELS.count).encoder.state_dict()
        save_file(state, CORPUS / "weights" / "model.safetensors")
        torch.save(state, CORPUS / "weights" / "model.pth")
        (CORPUS / "onnx" / "model.onnx").unlink(missing_ok=True)
        export_onnx(model, CORPUS / "onnx" / "model.onnx")
        for card in ("model.json", "model.md"):
            (CORPUS / "onnx" / card).unlink()
        _json(root, model)
        _yaml()
    from server_requests import write_seeds

    write_seeds()


if __name__ == "__main__":
    main()

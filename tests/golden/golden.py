"""Golden predictions: a small model of the phantom, one image, and its stored prediction.

`python tests/golden/golden.py` trains the model again and writes all files anew, in about two minutes. Do so only when
a change is meant to change predictions, and say so in the commit.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from pclmix import __version__
from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.export.onnx import export_onnx
from pclmix.inference import load
from pclmix.labels import Labels
from pclmix.methods.base import require_fitting
from pclmix.nets.cnn import BASIC, DEPTHS, Depth, ResNetEncoder, UNetDecoder
from pclmix.nets.segmenter import NETS, Net
from pclmix.synth.phantom import make_phantom
from pclmix.training.checkpoint import Checkpoint, Spacings, TrainedOn, load_checkpoint, trained_state
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training

WEIGHTS, EXPORT, IMAGE, EXPECTED = (
    Path(__file__).parent / name for name in ("golden.safetensors", "golden.onnx", "case_0000.nii.gz", "expected.npz")
)
NET = "golden"  #: a ResNet of 6 to 36 channels, so that the files stay small
CASE = "phantom001_frame01"
SETTINGS = ("engine.iterations=1500", "params.swin_width=6", "data.size=[64,64]", f"net={NET}")


def register() -> None:
    if NET not in NETS:
        DEPTHS.register(NET)(Depth(BASIC, (1, 1, 1, 1), 1, (6, 12, 24, 36)))
        NETS.register(NET)(Net(partial(ResNetEncoder, NET), UNetDecoder))


def checkpoint_file(folder: Path) -> Path:
    """The weights as a checkpoint of the present format, since predictions are tested, not the format."""
    register()
    config = load_config("demo", "pclmix", SETTINGS)
    spacing = (8.0, 1.5, 1.5)
    checkpoint = Checkpoint(
        version=__version__,
        config=config.model_copy(update={"params": require_fitting(config).model_dump(mode="json")}),
        labels=Labels(("background", "RV", "Myo", "LV"), 4),
        channels=("MRI",),
        spacing=Spacings(median=spacing, min=spacing, max=spacing),
        run=TrainedOn(dataset="phantom", fold=1, cases=("phantom002_frame01",)),
        step=config.engine.iterations,
        seconds=0.0,
        method={name: tensor.float() for name, tensor in load_file(WEIGHTS).items()},
    )
    torch.save(checkpoint.to_plain(), folder / "golden.ckpt")
    return folder / "golden.ckpt"


def predictions(model: Path, device: str = "cpu") -> dict[str, np.ndarray]:
    """Labels, labels with flips, entropy of four classes in steps of ln 4 / 255, and the figures of the case."""
    predictor = load(model, device=device)
    found = predictor.examine(IMAGE)
    return {
        "labels": predictor.predict(IMAGE),
        "flip": predictor.predict(IMAGE, tta="flip"),
        "entropy": np.rint(found.entropy * (255 / np.log(4))).astype(np.uint8),
        "figures": np.array([found.quality.certainty, *found.quality.dice, *found.quality.slice_errors]),
    }


def main() -> None:
    register()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_phantom(folder / "data", 8, 0)
        request = TrainRequest(folder / "data", folder / "run", recipe="demo", overrides=SETTINGS, fold=1, device="cpu")
        assert run_training(request)
        state = trained_state(load_checkpoint(folder / "run" / "last.ckpt"))
        kept = {k: v for k, v in state.items() if k.startswith(("net.", "aux."))}
        half = {k: v.half() if v.is_floating_point() else v.clone() for k, v in kept.items()}
        save_file({k: v.contiguous() for k, v in half.items()}, WEIGHTS)
        export_onnx(checkpoint_file(folder), folder / "golden.onnx")
        EXPORT.write_bytes((folder / "golden.onnx").read_bytes())
        image = nib.load(folder / "data" / "imagesTr" / f"{CASE}_0000.nii.gz").slicer[..., 1:4]
        nib.save(image, IMAGE)
        reference = Dataset.open(folder / "data").read_reference(CASE)[0][1:4]
        found = {"reference": reference.astype(np.uint8)}
        for kind, model in (("torch", checkpoint_file(folder)), ("onnx", EXPORT)):
            found |= {f"{kind}_{key}": value for key, value in predictions(model).items()}
        np.savez_compressed(EXPECTED, **found)


if __name__ == "__main__":
    main()

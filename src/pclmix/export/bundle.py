"""A MONAI bundle: weights, network and inference as configuration, which `python -m monai.bundle run` executes."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pclmix import __version__
from pclmix.errors import PclmixError, load_failure, need_extra
from pclmix.export.card import checkpoint_card, markdown
from pclmix.export.compare import compare
from pclmix.export.samples import find_samples
from pclmix.inference import load
from pclmix.inference.predictor import About, Predictor
from pclmix.inference.torch import BATCH, TorchPredictor
from pclmix.io.files import atomic_folder, read_json, refuse_existing, require_writable, write_json
from pclmix.training.checkpoint import Checkpoint, inference_state, open_model

METADATA, INFERENCE, WEIGHTS = "configs/metadata.json", "configs/inference.json", "models/model.pt"
_README = """# {name}

Segments {classes} in {channels} images; made by pclmix {version}. It needs pclmix, which defines the network, and
MONAI: pip install '.[export]' in a clone of pclmix.

    python -m monai.bundle run --config_file configs/inference.json --bundle_root . \\
        --dataset_dir IMAGES --output_dir PREDICTIONS

IMAGES is a NIfTI file, a folder of them or a dataset. The label maps have the images' own size and header.
MODEL.md is the model card: training data, scores, limits.
"""


def export_bundle(model: Path | str, out: Path | str, *, images: Path | str | None = None) -> dict[str, Any]:
    """Write MODEL as a MONAI bundle, the folder OUT, after running it and comparing it with the original.

    They are compared on `images`, by default on the phantom. Returns the content of OUT/comparison.json.
    """
    out = Path(out)
    if out.suffix:
        raise PclmixError(f"{out}: a bundle is a folder; give a name without an ending")
    refuse_existing(out)
    require_writable(out)
    need_extra("monai", "export", "exporting a MONAI bundle")
    checkpoint = open_model(Path(model))
    original = load(model, device="cpu")
    with atomic_folder(out) as folder:
        for name in ("configs", "models", "docs"):
            (folder / name).mkdir()
        torch.save({name: tensor.clone() for name, tensor in inference_state(checkpoint).items()}, folder / WEIGHTS)
        write_json(folder / METADATA, describe(original.about))
        write_json(folder / INFERENCE, inference(checkpoint, original.about))
        about = original.about
        text = _README.format(
            name=out.name,
            classes=", ".join(about.labels.foreground),
            channels=", ".join(about.channels),
            version=__version__,
        )
        (folder / "docs" / "README.md").write_text(text, encoding="utf-8")
        card = markdown(checkpoint_card(Path(model), checkpoint), out.name)
        (folder / "docs" / "MODEL.md").write_text(card, encoding="utf-8")
        samples = find_samples(about, Path(images) if images is not None else None)
        difference = compare(original, _from_config(folder), samples)
        if not difference.acceptable("fp32"):
            raise PclmixError(f"the bundle's labels differ from the model's on {1 - difference.argmax_agreement:.2%}")
        report = {"model": str(model), **difference.to_json(), "version": __version__}
        write_json(folder / "comparison.json", report)
    return report


def describe(about: About) -> dict[str, Any]:
    """metadata.json: the keys that MONAI's tools require, and under `pclmix` the description of the model."""
    packages = {name: metadata.version(name) for name in ("monai", "torch", "numpy", "nibabel")}
    height, width = about.seen
    image = {
        "type": "image",
        "format": "magnitude",
        "modality": ", ".join(about.channels),
        "num_channels": len(about.channels),
        "spatial_shape": [height, width],
        "dtype": "float32",
        "value_range": [0, 1],
        "is_patch_data": about.patch is not None,
        "channel_def": {str(c): name for c, name in enumerate(about.channels)},
    }
    predicted = {
        **{key: image[key] for key in ("type", "spatial_shape", "dtype", "is_patch_data")},
        "format": "segmentation",
        "num_channels": about.labels.count,
        "value_range": [],
        "channel_def": {str(k): name for k, name in enumerate(about.labels.names)},
    }
    return {
        "version": __version__,
        "changelog": {__version__: "exported"},
        "monai_version": packages["monai"],
        "pytorch_version": packages["torch"].partition("+")[0],
        "numpy_version": packages["numpy"],
        "required_packages_version": {"nibabel": packages["nibabel"], "pclmix": __version__},
        "task": f"segmentation of {', '.join(about.labels.foreground)}",
        "description": "A network trained on scribbles; every slice of a volume is predicted at the image's own size.",
        "authors": "",
        "copyright": "",
        "intended_use": "research",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": predicted}},
        "pclmix": {"identity": about.identity, **about.to_json()},
    }


def inference(checkpoint: Checkpoint, about: About) -> dict[str, Any]:
    """inference.json: the network, its weights and the call that predicts files."""
    return {
        "imports": ["$import torch", "$from pclmix.inference.files import predict_files"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "tta": "none",
        "network_def": {
            "_target_": "pclmix.nets.segmenter.build_segmenter",
            "net": checkpoint.config.net,
            "in_channels": len(about.channels),
            "classes": about.labels.count,
        },
        "predictor": {
            "_target_": "pclmix.export.bundle.bundle_predictor",
            "network": "@network_def",
            "bundle_root": "@bundle_root",
            "device": "@device",
        },
        "run": ["$predict_files(@predictor, @dataset_dir, @output_dir, tta=@tta).require_good()"],
    }


def bundle_predictor(network: nn.Module, bundle_root: str, device: torch.device | str) -> Predictor:
    """The predictor of a bundle. The configuration calls this."""
    root, place = Path(bundle_root), torch.device(device)
    try:
        network.load_state_dict(torch.load(root / WEIGHTS, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file raises errors of many types
        raise PclmixError(f"{root / WEIGHTS} cannot be used ({load_failure(error)}); export again") from error
    said = read_json(root / METADATA).get("pclmix", {})
    about = About.from_json(said, str(root), str(said.get("identity", "")))
    return TorchPredictor(about, network, place, bf16=False, batch=BATCH[place.type])


def _from_config(folder: Path) -> Predictor:
    """The predictor that MONAI builds from the configuration."""
    from monai.bundle import ConfigParser

    parser = ConfigParser()
    parser.read_config(str(folder / INFERENCE))
    parser["bundle_root"] = str(folder)
    parser["device"] = "cpu"
    predictor: Predictor = parser.get_parsed_content("predictor")
    return predictor

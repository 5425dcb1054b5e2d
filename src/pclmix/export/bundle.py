"""Model cards and MONAI bundles. `python -m monai.bundle run` executes a bundle's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pclmix import __version__
from pclmix.data.habits import HABITS
from pclmix.errors import PclmixError, load_failure, need_extra
from pclmix.export.compare import compare, find_samples
from pclmix.inference import load
from pclmix.inference.onnx import open_session, read_metadata
from pclmix.inference.predictor import About, Predictor
from pclmix.inference.torch import BATCH, TorchPredictor, about_model
from pclmix.io.files import atomic_folder, read_json, refuse_existing, require_writable, write_json
from pclmix.methods.base import find_method
from pclmix.training.checkpoint import LAST, PREVIOUS, Checkpoint, inference_state, open_model

#: Section -> row -> text, number, list or table.
Card = dict[str, dict[str, Any]]
EVALUATION, ENVIRONMENT = "evaluation.json", "environment.json"
PURPOSE = "Research. Not a medical device: not for diagnosis, treatment or any decision about a patient."


def model_card(model: Path) -> Card:
    """The card of a run folder, a checkpoint or an exported .onnx file."""
    model = Path(model)
    if not model.exists():
        raise PclmixError(f"{model} does not exist; give a run folder, a model file or a dataset")
    if model.is_dir() and not any((model / name).is_file() for name in (LAST, PREVIOUS)):
        raise PclmixError(
            f"{model} holds neither dataset.json nor {LAST}; give a run folder, a checkpoint, a .onnx file or a dataset"
        )
    if model.suffix.lower() != ".onnx":
        return checkpoint_card(model, open_model(model))
    content = read_metadata(model, open_session(model, "cpu"))
    card = content.get("card")
    if not isinstance(card, dict) or not all(isinstance(rows, dict) for rows in card.values()):
        raise PclmixError(f"{model} carries no model card; export the model again")
    exported = {"precision": content.get("precision"), "pclmix": content.get("version")}
    return {**card, "export": exported}


def checkpoint_card(model: Path, checkpoint: Checkpoint) -> Card:
    """The card of a checkpoint; a run folder adds scores, device and package versions."""
    config, labels, run = checkpoint.config, checkpoint.labels, checkpoint.run
    about = about_model(model, checkpoint)
    folder = model if model.is_dir() else model.parent
    environment = _optional(folder / ENVIRONMENT)
    calibrated = about.temperature != 1
    size = " x ".join(str(n) for n in config.data.size)
    size += "" if config.data.patch is None else ", seen in parts of " + " x ".join(str(n) for n in config.data.patch)
    return {
        "task": {
            "segments": list(labels.foreground),
            "channels": list(checkpoint.channels),
            "label values": [f"{k} {name}" for k, name in enumerate(labels.names)],
            "intended use": PURPOSE,
        },
        "data": {
            "dataset": run.dataset,
            "training cases": len(run.cases),
            "fold left out": run.fold,
            "median spacing": " x ".join(f"{mm:.3g}" for mm in checkpoint.spacing.median) + " mm (z, y, x)",
        },
        "training": {
            "supervision": find_method(config.method).needs,
            "method": config.method,
            "recipe": config.recipe,
            "network": f"{config.net}, encoder weights: {Path(config.encoder.weights).name}",
            "input": f"slices of {size}, intensities per {config.data.intensity}, aspect: {config.data.aspect}",
            "steps": checkpoint.step,
            "rounds": f"{checkpoint.round.number} of {config.rounds.count}" if config.rounds.count > 1 else None,
            "minutes": round(checkpoint.seconds / 60, 2),
            "seed": config.seed,
            "device": environment.get("device"),
        },
        "stroke habits": _habits(checkpoint),
        "scores": _scores(folder, run.cases),
        "limits": {
            "scope": "Other scanners, protocols, organs and patients than those of the dataset are untested.",
            "slices": "Slices are predicted one by one; neighbouring slices may disagree.",
            "probabilities": f"Calibrated, temperature {about.temperature:.3g}." if calibrated else "Not calibrated.",
        },
        "versions": {"pclmix": checkpoint.version, **environment.get("packages", {}), "weights": about.identity},
    }


def markdown(card: Card, title: str) -> str:
    """The card as MODEL.md."""
    lines = [f"# {title}"]
    for section, rows in card.items():
        before = () if "none" in rows else _INTRODUCTIONS.get(section, ())
        lines += ["", f"## {section.capitalize()}", "", *before, "| | |", "|---|---|"]
        lines += [f"| {name} | {shown(value)} |" for name, value in rows.items() if value is not None]
        words = dict.fromkeys(word for value in rows.values() if isinstance(value, list) for word in value)
        meanings = [f"- {word}: {HABITS[word]}." for word in words if word in HABITS]
        lines += ["", *meanings] if meanings else []
    return "\n".join(lines) + "\n"


_INTRODUCTIONS = {
    "stroke habits": ("What training assumed of the strokes of its dataset:", ""),
    "scores": ("Of the trained network, against dense masks:", ""),
}


def shown(value: Any) -> str:
    """A value of a card as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(item).replace(', ', ' + ')}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _habits(checkpoint: Checkpoint) -> dict[str, Any]:
    """The stroke habits of the training dataset; another dataset may differ."""
    rows: dict[str, Any] = {}
    for name, words in checkpoint.config.habits.items():
        rows[name] = [words] if isinstance(words, str) else list(words)
    share = checkpoint.config.data.ring_share
    if rows and share > 0:
        rows["ring_share"] = share
    return rows or {"none": "no assumption beyond the strokes"}


def _scores(folder: Path, trained_on: Sequence[str]) -> dict[str, Any]:
    content = _optional(folder / EVALUATION)
    try:
        mean, sd, cases = content["mean"], content["sd"], [case["case"] for case in content["cases"]]
        rows: dict[str, Any] = {
            f"{name}{unit}, mean (sd)": f"{mean[name]:.3f} ({sd[name]:.3f})"
            for name, unit in (("Dice", ""), ("HD95", f" in {content['unit']}"), ("ASSD", f" in {content['unit']}"))
            if mean[name] is not None
        }
        seen = len(set(cases) & set(trained_on))
        dice = {name: measures["Dice"]["mean"] for name, measures in content["classes"].items()}
        rows |= {
            "Dice by class": {name: None if value is None else f"{value:.3f}" for name, value in dice.items()},
            "cases": len(cases),
            "of them trained on": seen or None,
            "postprocessing": "largest component" if content["largest_component"] else "none",
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {"none": f"pclmix evaluate --out {folder.name}/{EVALUATION} adds them, before an export"}
    return rows


def _optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_json(path)
    return content if isinstance(content, dict) else {}


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
        samples = find_samples(about, Path(images) if images is not None else None)
        difference = compare(original, _from_config(folder), samples)
        if not difference.acceptable("fp32"):
            raise PclmixError(f"the bundle's labels differ from the model's on {1 - difference.argmax_agreement:.2%}")
        card = {**checkpoint_card(Path(model), checkpoint), "export": {"precision": "fp32", **difference.rows()}}
        (folder / "docs" / "MODEL.md").write_text(markdown(card, out.name), encoding="utf-8")
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
        "intended_use": PURPOSE,
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
    except Exception as error:  # damaged files raise many types of errors
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

"""Model cards: data, training, assumptions, scores and limits of a model.

`pclmix info` prints the card of a run or checkpoint; every exported model carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pclmix.data.habits import HABITS
from pclmix.errors import PclmixError
from pclmix.inference.checkpoint import about_model
from pclmix.inference.onnx import open_session, read_metadata
from pclmix.io.files import read_json
from pclmix.methods.base import find_method
from pclmix.training.checkpoint import LAST, PREVIOUS, Checkpoint, open_model

#: Section -> row -> a text, a number, a list or a table of them.
Card = dict[str, dict[str, Any]]
EVALUATION, ENVIRONMENT = "evaluation.json", "environment.json"
PURPOSE = "Research. Not a medical device: not for diagnosis, treatment or any decision about a patient."


def model_card(model: Path) -> Card:
    """The card of a run folder, a checkpoint or an exported .onnx file."""
    model = Path(model)
    if model.is_dir() and not any((model / name).is_file() for name in (LAST, PREVIOUS)):
        raise PclmixError(f"{model} holds neither dataset.json nor {LAST}; give a run folder, a dataset or a model")
    if model.suffix.lower() != ".onnx":
        return checkpoint_card(model, open_model(model))
    if not model.is_file():
        raise PclmixError(f"{model} does not exist")
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
            "intended use": PURPOSE,
        },
        "data": {
            "dataset": run.dataset,
            "training cases": len(run.cases),
            "fold left out": run.fold,
            "classes": list(labels.names),
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
            "slices": "Each slice is predicted on its own; nothing makes neighbouring slices agree.",
            "probabilities": f"Calibrated, temperature {about.temperature:.3g}." if calibrated else "Not calibrated.",
        },
        "versions": {"pclmix": checkpoint.version, **environment.get("packages", {}), "weights": about.identity},
    }


def markdown(card: Card, title: str) -> str:
    """The card as MODEL.md."""
    lines = [f"# {title}"]
    for section, rows in card.items():
        lines += ["", f"## {section.capitalize()}", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {shown(value)} |" for name, value in rows.items() if value is not None]
        words = dict.fromkeys(word for value in rows.values() if isinstance(value, list) for word in value)
        meanings = [f"- {word}: {HABITS[word]}." for word in words if word in HABITS]
        lines += ["", *meanings] if meanings else []
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """A value of a card as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(item).replace(', ', ' + ')}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _habits(checkpoint: Checkpoint) -> dict[str, Any]:
    """The stroke habits that the dataset stated; another dataset may have others."""
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
        rows |= {
            "cases": len(cases),
            "of them trained on": seen or None,
            "postprocessing": "largest component" if content["largest_component"] else "none",
        }
    except (KeyError, TypeError, ValueError):
        return {"none": f"pclmix evaluate --out {folder.name}/{EVALUATION} adds them"}
    return rows


def _optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_json(path)
    return content if isinstance(content, dict) else {}

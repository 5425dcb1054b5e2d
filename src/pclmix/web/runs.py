"""What a run folder says of its training, read while it is written."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from pclmix.config import planned_steps
from pclmix.io.files import read_json

_POINTS = 200  # of the loss curve as the page gets it


def training(run: Path, since: float | None) -> dict[str, Any]:
    """Phase, step, share done, seconds left and the loss curve of a run folder.

    `since` is when the job that is training it began, None where none is. The phase is preparing until the loop
    starts, training, and finishing once the budget is spent: checkpoint, scores and pictures are still written then.
    """
    lines = _metrics(run / "metrics.jsonl")
    about = read_json(run / "run.json") if (run / "run.json").is_file() else {}
    config = read_yaml(run / "config.yaml")
    engine = config.get("engine", {})
    step = max(int(about.get("step", 0)), lines[-1]["step"] if lines else 0)
    budget, spent = engine.get("seconds"), float(about.get("seconds", 0.0))
    begun = (run / "run.json").stat().st_mtime if about else 0.0  # written when the loop starts
    running = since is not None and begun >= since
    elapsed = time.time() - begun if running else 0.0
    first = int(about.get("step", 0)) if running else step
    left: float | None
    if budget:
        share = (spent + elapsed) / float(budget)
        left = float(budget) - spent - elapsed
        over = share >= 1
    else:
        total = planned_steps(config) if engine else 1
        share = step / total
        left = elapsed / (step - first) * (total - step) if step > first else None
        over = step + int(engine.get("log_every", 1)) > total  # the last steps are not logged
    phase = "" if since is None else "preparing" if not running else "finishing" if over else "training"
    thin = lines[:: max(1, -(-len(lines) // _POINTS))]
    curve = [[line["step"], round(line["loss"], 4)] for line in thin if "loss" in line]
    shown = min(1.0, share) if about else 0.0
    left = None if left is None else max(0.0, left)
    return {"phase": phase, "step": step, "share": shown, "left": left, "curve": curve}


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; the last may be half written."""
    found = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}

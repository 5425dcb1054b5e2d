"""What a checkpoint holds besides weights, and how a run is put back where it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pclmix import __version__
from pclmix.config import Config
from pclmix.data.dataset import Dataset
from pclmix.data.store import Store
from pclmix.distributed import Process
from pclmix.engine.optim import Optimizer, WeightAverage
from pclmix.errors import PclmixError
from pclmix.methods.base import Method, build_params, find_method


@dataclass
class Position:
    """How far a run has come: steps done and seconds trained."""

    step: int = 0
    seconds: float = 0.0

    def progress(self, config: Config) -> float:
        """t/T, or the share of the time budget where there is one."""
        if config.engine.seconds is not None:
            return min(1.0, self.seconds / config.engine.seconds)
        return self.step / config.engine.iterations


def about(dataset: Dataset, config: Config, cases: Sequence[str], fold: int | None, store: Store) -> dict[str, Any]:
    """What a checkpoint says of itself besides weights: enough to predict with it and to repeat it."""
    spacings = np.array(store.spacings)
    return {
        "version": __version__,
        "config": config.model_dump(mode="json"),
        "labels": {"names": list(dataset.labels.names), "ignore": dataset.labels.ignore},
        "channels": list(dataset.channels),
        "spacing": {
            n: [float(v) for v in f(spacings, axis=0)]
            for n, f in (("median", np.median), ("min", np.min), ("max", np.max))
        },
        "run": {"dataset": dataset.name, "fold": fold, "cases": list(cases)},
    }


def require_same(content: dict[str, Any], config: Config, dataset: Dataset, fold: int | None, run: Path) -> None:
    """A resume must go on with what was begun."""
    for what, before, here in (
        ("classes", content["labels"]["names"], dataset.labels.names),
        ("channels", content["channels"], dataset.channels),
    ):
        if list(before) != list(here):
            raise PclmixError(
                f"{run} was trained on the {what} {', '.join(before)}, {dataset.root} has {', '.join(here)}; "
                "give the dataset it was trained on, or another --out"
            )
    # A setting that a checkpoint of an earlier version does not know was at its default then, a method's own one too.
    params = build_params(find_method(config.method), {}).model_dump(mode="json")
    then = flatten(Config(params=params).model_dump(mode="json")) | flatten(content["config"])
    now = flatten(config.model_dump(mode="json"))
    # Both ways: what was left out of an open table, such as offset, is in none of the keys of now.
    changed = [key for key in now | then if now.get(key) != then.get(key)]
    if changed:
        shown = ", ".join(f"{key}: {then.get(key)} then, {now.get(key)} now" for key in changed[:3])
        raise PclmixError(f"{run} was trained with other settings ({shown}); repeat them or choose another --out")
    if fold != content["run"]["fold"]:
        raise PclmixError(f"{run} was trained on fold {content['run']['fold']}; give the same --fold or another --out")


def require_same_cases(content: dict[str, Any], cases: Sequence[str], dataset: Dataset, run: Path) -> None:
    """The order of a run's slices follows from its cases: with others it would be another run."""
    before = content["run"]["cases"]
    if list(cases) == list(before):
        return
    then, now = set(before), set(cases)
    changes = [([c for c in before if c not in now], "missing"), ([c for c in cases if c not in then], "new")]
    named = " and ".join(f"{len(c)} {word} ({c[0]}{', ...' if len(c) > 1 else ''})" for c, word in changes if c)
    raise PclmixError(
        f"{run} was trained on {len(before)} cases of {dataset.root}; now {named or 'they are in another order'}; "
        "give the dataset and the folds it was trained on, or another --out"
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def random_state(generator: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    state = {"own": generator.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(
    content: dict[str, Any],
    method: Method,
    optimizer: Optimizer,
    average: WeightAverage | None,
    generator: torch.Generator,
    process: Process,
) -> Position:
    """Put everything a checkpoint holds back where it was."""
    if len(content["random"]) != process.world:
        count = len(content["random"])
        raise PclmixError(f"this run was trained on {count} device(s); resume it with --devices {count}")
    method.load_state_dict(content["method"])
    optimizer.load_state_dict(content["optimizer"])
    if average is not None:
        average.load_state_dict(content["average"])
    state = content["random"][process.rank]
    generator.set_state(state["own"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], process.device)
    return Position(content["step"], content["seconds"])

"""`pclmix plan`, and `pclmix train` without a recipe: a dataset, the device here and minutes to a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pclmix.data.dataset import Dataset
from pclmix.data.survey import survey
from pclmix.nets.device import device_kind
from pclmix.training.planner import MINUTES, SHARE, DataPlan, Device, make_data_plan
from pclmix.training.timing import precision_and_rate

#: A captured graph trains so many times as fast as the eager steps that are timed: 46 against 94 ms on an H200.
_GRAPH = 2.0


def find_device(name: str) -> Device:
    """The device by its name, with its memory."""
    kind = device_kind(name)
    if kind == "cpu":
        return Device("cpu", bf16=False)
    return Device("cuda", float(torch.cuda.get_device_properties(0).total_memory), torch.cuda.is_bf16_supported())


def plan_dataset(
    dataset: Dataset,
    cases: Sequence[str] | None = None,
    *,
    device: str = "auto",
    minutes: float | None = None,
    method: str | None = None,
    timed: bool = False,
    show: bool = False,
) -> DataPlan:
    """The plan for `cases` (default: all). `timed` runs a few steps of `method` first; without it, nothing runs."""
    place, minutes = find_device(device), MINUTES if minutes is None else minutes
    found = survey(dataset, cases, show=show)
    plan = make_data_plan(found, place, minutes)
    if not timed:
        return plan
    config = plan.config(method)
    here = torch.device(place.kind)
    precision, rate = precision_and_rate(config, len(dataset.channels), dataset.labels.count, here)
    if place.kind == "cuda":
        return make_data_plan(found, replace(place, rate=rate * _GRAPH), minutes)
    return make_data_plan(found, replace(place, rate=rate, bf16=precision == "bf16"), minutes)


def minutes_of(overrides: Sequence[str], minutes: float | None) -> float | None:
    """The minutes to plan for: as given, or what the last `engine.seconds` among the settings asks for."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("engine.seconds=")]
    if minutes is not None or not given:
        return minutes
    try:
        seconds = float(given[-1])
    except ValueError:
        return None  # the configuration refuses it, naming the key
    return seconds / 60 / SHARE if math.isfinite(seconds) and seconds > 0 else None

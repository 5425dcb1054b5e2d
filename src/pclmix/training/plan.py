"""From a request to a plan: settings resolved, checked against dataset, devices and an earlier run. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pclmix.config import Config, config_from_text, load_config, override_config, planned_steps
from pclmix.data.dataset import Dataset
from pclmix.data.habits import override_habits
from pclmix.data.survey import survey
from pclmix.errors import PclmixError
from pclmix.io.files import KeptFiles, read_table, refuse_existing, require_writable
from pclmix.methods.base import build_params, find_method, require_fitting
from pclmix.nets.segmenter import build_segmenter, check_side, device_kind
from pclmix.nets.weights import fitting_net
from pclmix.training.checkpoint import Checkpoint, load_newest
from pclmix.training.finetune import Start, open_start
from pclmix.training.log import RUN, read_config
from pclmix.training.planner import MINUTES, SHARE, DataPlan, Device, make_data_plan
from pclmix.training.probe import precision_and_rate
from pclmix.training.request import TrainRequest, require_minutes

#: Speed of a captured graph relative to the eager steps that are timed: 46 against 94 ms on an H200.
_GRAPH = 2.0


def find_device(name: str) -> Device:
    """The device by name, with its memory."""
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
    require_minutes(minutes)
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
    """The minutes to plan for: as given, or from the last `engine.seconds` among the settings."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("engine.seconds=")]
    if minutes is not None or not given:
        return minutes
    try:
        seconds = float(given[-1])
    except ValueError:
        return None  # the configuration refuses it and names the key
    return seconds / 60 / SHARE if math.isfinite(seconds) and seconds > 0 else None


_BUDGET = ("engine.iterations=", "engine.seconds=")


@dataclass(frozen=True)
class Plan:
    """A resolved training, and the checkpoint to continue from."""

    request: TrainRequest
    config: Config
    dataset: Dataset
    fold: int | None
    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()  #: notes printed before training
    planned: DataPlan | None = None  #: the plan made from the data, if no recipe was given
    minutes: float | None = None  #: time from the command to the end of the run
    start: Start | None = None  #: the run to take weights from, unless resumed

    @property
    def out(self) -> Path:
        return Path(self.request.out)

    @property
    def is_finished(self) -> bool:
        """Whether the run in the folder is finished."""
        if self.checkpoint is None or not (self.out / RUN).is_file():
            return False
        engine = self.config.engine
        spent = engine.seconds is not None or self.checkpoint.step >= planned_steps(self.config.model_dump())
        return spent and read_table(self.out / RUN).get("status") == "finished"


def plans_from_data(request: TrainRequest) -> bool:
    """Whether settings come from the data: there is no recipe, and no run to continue."""
    out = Path(request.out)
    return request.recipe is None and not (request.resume and _settings_of(out, load_newest(out)) is not None)


def make_plan(request: TrainRequest, planned: DataPlan | None = None) -> Plan:
    """Resolve a request. A resumed run uses its own settings and refuses different ones.

    `planned` is the plan from the data, if another rank has made it.
    """
    out, fold = Path(request.out), request.fold
    if out.is_file():
        raise PclmixError(f"{out} is a file; choose another name for the run folder")
    checkpoint = load_newest(out) if request.resume else None
    earlier = _settings_of(out, checkpoint) if request.resume else None
    if earlier is not None and fold is None and (request.recipe is None or checkpoint is not None):
        fold = _fold_of(out, checkpoint)
    if checkpoint is not None and request.minutes is not None:
        raise PclmixError(
            f"--minutes {request.minutes:g}: {out} is resumed with its own time budget; leave --minutes out"
        )
    if not request.resume:
        refuse_existing(out, way_out="continue it with --resume, choose another name or remove it first")
    require_writable(out)
    dataset = Dataset.open(Path(request.dataset))
    start_from = request.start_from or (_start_of(out) if request.resume else None)
    start = None  # opened before the data is surveyed, which takes a while
    if start_from is not None and checkpoint is None:
        start = open_start(start_from, dataset.channels)
    if earlier is not None and request.recipe is None:
        config = override_config(earlier, request.method, request.overrides)
    elif request.recipe is not None:
        config = load_config(request.recipe, request.method, request.overrides)
    else:
        dataset = replace(dataset, files=KeptFiles())
        planned = planned or _plan_from_data(request, dataset, fold)
        config = planned.config(request.method, _without_clock(request.overrides))
    if start is not None:
        encoder = config.encoder.model_copy(update={"weights": "none"})
        config = config.model_copy(update={"net": start.net, "encoder": encoder})
    params = require_fitting(config)
    net = fitting_net(config.net, config.encoder.weights, (earlier or {}).get("net"))
    notes = [] if start is None else [start.describe(dataset.labels)]
    if net != config.net:
        notes.append(f"{config.encoder.weights} holds weights of {net}: training {net} instead of {config.net}.")
    config = config.model_copy(update={"net": net, "params": params.model_dump(mode="json")})
    require_fit(config, len(dataset.channels), dataset.labels.count, request.world)
    if checkpoint is not None:
        require_same_classes(checkpoint, dataset, out)
    config = with_habits(config, dataset)
    if checkpoint is not None:
        require_same(checkpoint, config, fold, out)
        if checkpoint.random is not None and len(checkpoint.random) != request.world:
            count = len(checkpoint.random)
            raise PclmixError(f"{out} was trained on {count} device(s); resume it with --devices {count}")
    if earlier is None and request.resume and request.expect_run:
        where = "all cases" if fold is None else f"fold {fold}"
        notes.append(f"{out} holds no run: starting one, {config.method} with recipe {config.recipe} on {where}.")
    minutes = request.minutes
    if planned is not None:
        notes += planned.notes
        if minutes is None and not any(word.startswith(_BUDGET) for word in request.overrides):
            minutes = MINUTES
        notes.append(_estimate(config, planned, minutes))
    return Plan(request, config, dataset, fold, checkpoint, tuple(notes), planned, minutes, start)


def _plan_from_data(request: TrainRequest, dataset: Dataset, fold: int | None) -> DataPlan:
    """The plan of a run without a recipe. Ranks do not time, since their plans would differ."""
    config_from_text("", "plan", request.method, request.overrides)  # refuses misspelt keys before any file is read
    return plan_dataset(
        dataset,
        training_cases(dataset, fold, request.cases),
        device=request.device,
        minutes=minutes_of(request.overrides, request.minutes),
        method=request.method,
        timed=request.world == 1,
    )


def _without_clock(overrides: Sequence[str]) -> list[str]:
    """The settings, with a number of steps in place of the plan's time."""
    steps = any(word.startswith("engine.iterations=") for word in overrides)
    return ["engine.seconds=null", *overrides] if steps else list(overrides)


def _estimate(config: Config, planned: DataPlan, minutes: float | None) -> str:
    h, w = config.data.seen
    parts = "parts of slices" if config.data.patch is not None else "slices"
    engine = config.engine
    if minutes is not None:
        time = f"about {planned.steps} steps; finished about {minutes:g} min after the start of the command"
    else:
        time = f"{engine.iterations} steps" if engine.seconds is None else f"{engine.seconds:g} seconds of training"
    return f"plan: {config.net} on {parts} of {h} x {w}, {engine.batch} a step, {time}"


def with_habits(config: Config, dataset: Dataset) -> Config:
    """The configuration with the stroke habits of the dataset for the classes that it does not name itself."""
    habits = override_habits(dataset.habits, config.habits, dataset.labels)
    return config.model_copy(update={"habits": {name: list(words) for name, words in habits.items()}})


def require_fit(config: Config, in_channels: int, classes: int, world: int) -> None:
    """Refuse an invalid batch or image size."""
    batch = config.engine.batch
    if batch % world:
        raise PclmixError(f"engine.batch={batch} cannot be split over {world} devices; choose a multiple of {world}")
    if batch // world < 2:
        raise PclmixError(
            f"engine.batch={batch} on {world} device(s) leaves {batch // world} image per step and device: "
            f"BatchNorm needs two; set engine.batch={2 * world} or more"
        )
    if config.rounds.count > 1 and classes > 256:
        raise PclmixError(
            f"rounds.count={config.rounds.count}: further rounds need 256 classes or fewer, not {classes}"
        )
    if config.rounds.count > 1 and config.data.patch is not None:
        raise PclmixError(
            f"rounds.count={config.rounds.count}: further rounds train on whole slices; set data.patch=null"
        )
    with torch.device("meta"):  # the shapes of the network, without its weights
        net = build_segmenter(config.net, in_channels, classes)
    try:
        check_side(*config.data.seen, net.multiple)
    except PclmixError as error:
        key = "data.size" if config.data.patch is None else "data.patch"
        raise PclmixError(f"{key}={list(config.data.seen)}: {error}") from None


def require_same_classes(checkpoint: Checkpoint, dataset: Dataset, run: Path) -> None:
    """A resumed run needs the classes and channels that it was started with."""
    for what, before, here in (
        ("classes", checkpoint.labels.names, dataset.labels.names),
        ("channels", checkpoint.channels, dataset.channels),
    ):
        if list(before) != list(here):
            raise PclmixError(
                f"{run} was trained on the {what} {', '.join(before)}, {dataset.root} has {', '.join(here)}; "
                "give the dataset it was trained on, or another --out"
            )


def require_same(checkpoint: Checkpoint, config: Config, fold: int | None, run: Path) -> None:
    """A resumed run needs the settings and the fold that it was started with."""
    # A method's parameter missing in a checkpoint of an earlier version had its default.
    params = build_params(find_method(config.method), {}).model_dump(mode="json")
    then = _flatten({"params": params}) | _flatten(checkpoint.config.model_dump(mode="json"))
    now = _flatten(config.model_dump(mode="json"))
    # Both ways: an entry removed from an open table is missing in `now`.
    changed = [key for key in now | then if now.get(key) != then.get(key)]
    if changed:
        shown = ", ".join(f"{key}: {then.get(key)} then, {now.get(key)} now" for key in changed[:3])
        raise PclmixError(f"{run} was trained with other settings ({shown}); repeat them or choose another --out")
    if fold != checkpoint.run.fold:
        raise PclmixError(f"{run} was trained on fold {checkpoint.run.fold}; give the same --fold or another --out")


def require_same_cases(checkpoint: Checkpoint, cases: Sequence[str], dataset: Dataset, run: Path) -> None:
    """The order of a run's slices depends on its cases, so a resumed run needs the same ones."""
    before = checkpoint.run.cases
    if list(cases) == list(before):
        return
    then, now = set(before), set(cases)
    changes = [([c for c in before if c not in now], "missing"), ([c for c in cases if c not in then], "new")]
    named = " and ".join(f"{len(c)} {word} ({c[0]}{', ...' if len(c) > 1 else ''})" for c, word in changes if c)
    raise PclmixError(
        f"{run} was trained on {len(before)} cases of {dataset.root}; now {named or 'they are in another order'}; "
        "give the dataset and the folds it was trained on, or another --out"
    )


def training_cases(dataset: Dataset, fold: int | None, only: Sequence[str] | None = None) -> tuple[str, ...]:
    """All cases, or those not in the fold's test set, or `only` these of them; refused if empty."""
    cases = dataset.cases if fold is None else dataset.fold(fold).train
    if only is not None:
        wanted = set(only)
        cases = tuple(case for case in cases if case in wanted)
    if not cases:
        where = f" in fold {fold}; `pclmix split` makes other folds, of two patients or more" if fold else ""
        raise PclmixError(f"{dataset.root}: there is no case to train on{where}")
    return cases


def _settings_of(out: Path, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """The settings of the run in a folder, by its checkpoint or, before the first one, by config.yaml."""
    return read_config(out) if checkpoint is None else checkpoint.config.model_dump(mode="json")


def _fold_of(out: Path, checkpoint: Checkpoint | None) -> int | None:
    """The fold of the run in a folder, by its checkpoint or, before the first one, by run.json."""
    if checkpoint is not None:
        return checkpoint.run.fold
    fold = _status_of(out).get("fold")
    if fold is not None and type(fold) is not int:
        raise PclmixError(f"{out / RUN} is damaged: fold={fold!r}; give --fold")
    return fold


def _start_of(out: Path) -> Path | None:
    """The run whose weights a run without a checkpoint starts from."""
    known = _status_of(out).get("start_from")
    return Path(known) if known and isinstance(known, str) else None


def _status_of(out: Path) -> dict[str, Any]:
    return read_table(out / RUN) if (out / RUN).is_file() else {}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat

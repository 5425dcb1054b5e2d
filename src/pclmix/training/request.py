"""The arguments of a training as one value."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError, require_names


@dataclass(frozen=True)
class TrainRequest:
    """A dataset, a run folder and the settings to train with; see `pclmix train --help`.

    `cases`, if given, restrict the training cases; a resumed run needs the same ones. `resume` continues the run in
    `out`, or starts one where there is none; with `expect_run` it prints a note in that case. Without `recipe` the
    settings are planned from the data. With `minutes` the run is finished that long after `started`. `start_from` is a
    run whose weights are used, with classes matched by name.
    """

    dataset: Path
    out: Path
    method: str | None = None
    recipe: str | None = None
    overrides: Sequence[str] = ()
    fold: int | None = None
    cases: Sequence[str] | None = None
    resume: bool = False
    expect_run: bool = True
    device: str = "auto"
    devices: int = 1
    nodes: int = 1
    minutes: float | None = None
    start_from: Path | None = None
    started: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        """Validate arguments passed from Python; the command line has already checked their types."""
        require_names("overrides", self.overrides)
        for word in self.overrides:
            if not isinstance(word, str):
                raise PclmixError(f'overrides: {word!r} is not a setting; write KEY=VALUE, such as "optim.lr=0.01"')
        require_names("cases", self.cases)
        if self.fold is not None:
            _require_integer("fold", self.fold)
        if self.minutes is not None:
            require_minutes(self.minutes)
            for key in ("engine.iterations", "engine.seconds"):
                if any(word.partition("=")[0] == key for word in self.overrides):
                    raise PclmixError(
                        f"--minutes {self.minutes:g} and {key}: the minutes set the length; give one of them"
                    )
        _require_integer("devices", self.devices)
        _require_integer("nodes", self.nodes)

    @property
    def world(self) -> int:
        """The number of processes that train together."""
        return self.devices * self.nodes

    def resume_command(self) -> str:
        """The command that continues this run with the settings of its folder."""
        words: list[Any] = ["pclmix", "train", self.dataset, "--out", self.out, "--resume"]
        words += ["--device", self.device] if self.device != "auto" else []
        words += ["--devices", self.devices] if self.devices > 1 else []
        words += ["--nodes", self.nodes] if self.nodes > 1 else []
        return shlex.join(map(str, words))


def require_minutes(minutes: float) -> None:
    """Refuse minutes that are not a number above 0."""
    if not (minutes > 0 and math.isfinite(minutes)):
        raise PclmixError(f"--minutes {minutes:g}: a number above 0 is needed")


def _require_integer(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PclmixError(f"{key}={value!r}: an integer of at least 1 is needed")

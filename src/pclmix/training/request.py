"""What a caller asks of a training: the arguments of `pclmix train` as one value."""

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

    `cases`, where given, are the only ones trained on; a resumed run needs the same ones again. `resume` continues the
    run in `out`, or starts one where there is none; with `expect_run` it then says so. Without `recipe` the settings
    are planned from the data. With `minutes` the finished run is there so long after `started`.
    `start_from` is a run whose weights are taken over, classes matched by name.
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
        if self.minutes is not None and not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise PclmixError(f"--minutes {self.minutes}: a number above 0 is needed")
        _require_integer("devices", self.devices)
        _require_integer("nodes", self.nodes)

    @property
    def world(self) -> int:
        """The number of processes that train together."""
        return self.devices * self.nodes

    def resume_command(self) -> str:
        """The command that continues this run; its other settings are in the run folder."""
        words: list[Any] = ["pclmix", "train", self.dataset, "--out", self.out, "--resume"]
        words += ["--device", self.device] if self.device != "auto" else []
        words += ["--devices", self.devices] if self.devices > 1 else []
        words += ["--nodes", self.nodes] if self.nodes > 1 else []
        return shlex.join(map(str, words))


def _require_integer(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PclmixError(f"{key}={value!r}: an integer of at least 1 is needed")

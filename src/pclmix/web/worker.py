"""The process of a job: train or predict as its request says, and write the outcome.

python -m pclmix.web.worker DATASET JOB
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError
from pclmix.io.files import write_json
from pclmix.web.jobs import FULL, OUTCOME, PLAN, Jobs
from pclmix.web.strokes import StrokeStore
from pclmix.web.workspace import PredictionStore, Workspace, is_full


class Report:
    """Writes outcome.json; each call updates it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {}

    def say(self, **content: Any) -> None:
        self.content |= content
        write_json(self.path, self.content)


def run(root: Path, job: str) -> None:
    """Execute the request of a job and record success or failure."""
    workspace = Workspace(root)
    jobs = Jobs(workspace)
    report = Report(workspace.internal("jobs", job, OUTCOME))
    report.say(phase="preparing")
    request = jobs.request(job)
    try:
        if request["kind"] == "train":
            finished = _train(workspace, request, report)
            if finished and request["then"]:
                predict(workspace, str(request["run"]), request["then"], report)
        else:
            predict(workspace, str(request["run"]), request["cases"], report)
            finished = True
        report.say(status="finished" if finished else "stopped", phase="")
    except KeyboardInterrupt:
        report.say(status="stopped", phase="")
    except PclmixError as error:
        report.say(status="failed", message=str(error), phase="")
    except Exception as error:
        traceback.print_exc()
        report.say(status="failed", message=f"{type(error).__name__}: {error}", phase="")


def _train(workspace: Workspace, request: dict[str, Any], report: Report) -> bool:
    from rich.console import Console

    from pclmix.report.training import draw_run
    from pclmix.training.checkpoint import LAST
    from pclmix.training.request import TrainRequest
    from pclmix.training.start import run_training

    report.say(phase="training")
    seconds, planned = request["seconds"], request["recipe"] == PLAN
    out = workspace.internal("runs", str(request["run"]))
    begun = bool(request["resume"]) and (out / LAST).is_file()  # then the time budget is in its configuration
    training = TrainRequest(
        workspace.root,
        out,
        method=request["method"],
        recipe=None if planned else request["recipe"],
        overrides=[] if planned or seconds is None else [f"engine.seconds={seconds}"],
        cases=request.get("cases"),
        resume=bool(request["resume"]),
        minutes=seconds / 60 if planned and seconds is not None and not begun else None,
        started=float(request["started"]),
        start_from=start_from(workspace, request.get("start")),
    )
    finished = run_training(training, Console(stderr=True, force_terminal=False))
    if finished:
        draw_run(training.out)
    return finished


def start_from(workspace: Workspace, run: str | None) -> Path | None:
    """The folder of the run to start from; None, with a line in the log, if it is gone or no longer fits the data."""
    from pclmix.training.finetune import open_start

    if run is None:
        return None
    try:
        return open_start(workspace.internal("runs", run), workspace.dataset.channels).run
    except PclmixError as error:
        print(f"starting from random weights instead of {run}: {error}", file=sys.stderr)
        return None


def predict(workspace: Workspace, run: str, cases: list[str], report: Report) -> None:
    """Predict cases with a run; the page shows each as soon as it is written. Failures are collected and reported."""
    from pclmix.inference import load
    from pclmix.inference.inputs import require_same_task

    report.say(phase="predicting", done=0, total=len(cases), cases=[])
    predictor = load(workspace.internal("runs", run))
    dataset = workspace.dataset
    require_same_task(dataset, predictor.about.channels, predictor.about.labels)
    book, strokes = PredictionStore(workspace), StrokeStore(workspace)
    bad: list[str] = []
    for number, case in enumerate(cases, start=1):
        try:
            workspace.image_paths(case)
            volume = dataset.read_image(case)
            found = predictor.examine(volume.array)
            book.write(run, case, found, volume.geometry, dataset.labels, strokes.read(case).array)
        except PclmixError as error:
            bad.append(f"{case}: {error}")
        report.say(done=number, cases=[*report.content["cases"], case])
    if bad:
        raise PclmixError(f"{len(bad)} of {len(cases)} cases could not be predicted: {'; '.join(bad[:3])}")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # children of a background process inherit ignored signals
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    code = 0
    try:
        run(Path(sys.argv[1]), sys.argv[2])
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception as error:
        if not is_full(error):
            raise
        code = FULL
    os._exit(code)  # everything is on disk; unloading torch would hold the lock for a second or two

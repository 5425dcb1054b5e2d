"""The child process of a job: `python -m pclmix.web.worker DATASET JOB`. It trains or predicts and says how it went."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError
from pclmix.files import write_json
from pclmix.web.jobs import OUTCOME, Jobs
from pclmix.web.predictions import PredictionBook, Scorer
from pclmix.web.strokes import StrokeBook
from pclmix.web.workspace import Workspace


class Report:
    """outcome.json, kept up to date."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {}

    def say(self, **content: Any) -> None:
        self.content |= content
        write_json(self.path, self.content)


def run(root: Path, job: str) -> None:
    """Do what was asked; whatever happens is written down."""
    workspace = Workspace(root)
    jobs = Jobs(workspace)
    report = Report(workspace.corner("jobs", job, OUTCOME))
    report.say(phase="starting")
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

    from pclmix.engine.start import run_training

    report.say(phase="training")
    seconds = request["seconds"]
    return run_training(
        workspace.root,
        workspace.corner("runs", str(request["run"])),
        method=request["method"],
        recipe=request["recipe"],
        overrides=[] if seconds is None else [f"engine.seconds={seconds}"],
        cases=request.get("cases"),
        resume=bool(request["resume"]),
        console=Console(stderr=True, force_terminal=False),
    )


def predict(workspace: Workspace, run: str, cases: list[str], report: Report) -> None:
    """Predict cases with a run; each is there for the page as soon as it is written. One that fails is named."""
    from pclmix.predict.inputs import require_same_task
    from pclmix.predict.model import load

    report.say(phase="predicting", done=0, total=len(cases), cases=[])
    predictor = load(workspace.corner("runs", run))
    dataset = workspace.dataset
    require_same_task(dataset, predictor.about.channels, predictor.about.labels)
    book, strokes = PredictionBook(workspace), StrokeBook(workspace)
    bad: list[str] = []
    for number, case in enumerate(cases, start=1):
        try:
            workspace.image_paths(case)
            volume = dataset.read_image(case)
            scorer = Scorer()
            for part in predictor.probability_batches(volume.array):
                scorer.add(part)
            book.write(run, case, scorer.finish(), volume.geometry, dataset.labels, strokes.read(case).array)
        except PclmixError as error:
            bad.append(f"{case}: {error}")
        report.say(done=number, cases=[*report.content["cases"], case])
    if bad:
        raise PclmixError(f"{len(bad)} of {len(cases)} cases could not be predicted: {'; '.join(bad[:3])}")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a server started in the background passes on that they are ignored
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    run(Path(sys.argv[1]), sys.argv[2])

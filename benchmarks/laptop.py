"""A model in a minute on a laptop: draw, train, see, correct, train again, through the server of the workbench.

    python benchmarks/laptop.py --work /tmp/laptop acdc=ACDC ultrasound=SETS/ultrasound fundus=SETS/fundus

For each NAME=FOLDER a dataset is made of a few training cases of fold 1, and `pclmix serve` runs on it. A simulated
user talks to it as the page does, with the dataset's own strokes. The user

1. draws in the first cases (of volumes, in a few slices of each), clicks Train for one minute and waits for the
   prediction of an open case that has no strokes;
2. lets the model predict the further cases and draws there (of volumes, in the slices of "Where a stroke helps most");
3. trains again for a minute, once on from the last model and once from random weights;
4. trains from random weights on the same strokes for each further number of minutes.

Each model predicts test cases of the fold, raw. results/laptop/NAME.json is written after each training; what is in it
is not measured again, so the script can be stopped at any time. Use an idle machine; the load is noted.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pclmix.data.dataset import Dataset, group_by_patient, write_dataset_json
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.io.files import read_json, write_json
from pclmix.labels import IGNORE, IntArray
from pclmix.metrics import dice
from pclmix.training.log import RUN
from pclmix.web.strokes import runs_of

RESULTS = Path(__file__).parents[1] / "results" / "laptop"
FOLD, SLICES = 1, 3


def spread(items: list[Any], count: int) -> list[Any]:
    """`count` of the items at even distances."""
    return [items[int((i + 0.5) * len(items) / count)] for i in range(min(count, len(items)))]


class Desk:
    """A dataset of a few cases in a folder, and the user who works on it."""

    def __init__(self, source: Dataset, root: Path, first: int, more: int) -> None:
        self.source, self.root = source, root
        patients = list(group_by_patient(source.fold(FOLD).train, source.patient_pattern).values())
        cases = [own[i % len(own)] for i, own in enumerate(spread(patients, first + more))]
        self.more = sorted(spread(cases, more))
        self.first = sorted(set(cases) - set(self.more))
        self.strokes = {case: source.read_scribble(case)[0] for case in cases}

    def make(self) -> None:
        """The images without a stroke."""
        for case in self.strokes:
            for path in self.source.image_paths(case):
                copy = self.root / path.relative_to(self.source.root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        about = {"channels": self.source.channels, "labels": self.source.labels, "ending": self.source.ending}
        write_dataset_json(self.root, **about, cases=len(self.strokes), name=self.source.name)

    def begin(self, case: str) -> list[int]:
        """The slices that are drawn in before there is a model."""
        return spread(np.flatnonzero((self.strokes[case] > 0).any(axis=(1, 2))).tolist(), SLICES)

    def draw(self, client: httpx.Client, case: str, slices: list[int]) -> int:
        """Save the strokes of some slices; returns the pixels."""
        drawn: IntArray = np.full_like(self.strokes[case], IGNORE)
        drawn[slices] = self.strokes[case][slices]
        version = client.get(f"/api/cases/{case}/strokes").raise_for_status().headers["x-version"]
        body = {"version": version, "runs": runs_of(drawn)}
        client.post(f"/api/cases/{case}/strokes", json=body).raise_for_status()
        return int((drawn >= 0).sum())

    def correct(self, client: httpx.Client, case: str) -> list[int]:
        """The slices in which to draw, by the suggestions on the page; all of them where it has none."""
        named = dict.fromkeys(place["z"] for place in client.get(f"/api/cases/{case}/next").raise_for_status().json())
        useful = [z for z in named if (self.strokes[case][z] >= 0).any()]
        return useful[:SLICES] or self.begin(case)


@contextmanager
def serving(root: Path) -> Iterator[httpx.Client]:
    """`pclmix serve`; a job that runs is stopped at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pclmix", "serve", str(root), "--port", str(port), "--no-browser"]
    server = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is for this script, which stops the job first
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"x-pclmix": "1"}, timeout=60) as client:
            while True:
                with suppress(httpx.TransportError):
                    client.get("/api/dataset").raise_for_status()
                    break
                if server.poll() is not None:
                    raise PclmixError(f"the server of {root} has ended")
                time.sleep(0.2)
            try:
                yield client
            finally:
                while (client.get("/api/jobs").json()["job"] or {}).get("status") in ("running", "stopping"):
                    client.post("/api/jobs/stop", json={})  # the second one ends it at once
                    time.sleep(0.5)
    finally:
        server.terminate()
        server.wait()


def finished(client: httpx.Client) -> dict[str, Any]:
    """Wait for the end of the job."""
    while True:
        job: dict[str, Any] = client.get("/api/jobs").raise_for_status().json()["job"]
        if job["status"] == "finished":
            return job
        if job["status"] not in ("running", "stopping"):
            raise PclmixError(f"{job['kind']} {job['status']}: {job['message']}")
        time.sleep(0.1)


def train(client: httpx.Client, desk: Desk, test: list[str], minutes: float, warm: bool) -> dict[str, Any]:
    """Click Train, wait until the prediction of the open case has arrived, and score the model."""
    case, load_before = desk.more[0], os.getloadavg()[0]
    clicked = time.perf_counter()
    body = {"recipe": "plan", "minutes": minutes, "warm": warm, "then": [case]}
    job = client.post("/api/jobs/train", json=body).raise_for_status().json()["id"]
    ended = finished(client)
    client.get(f"/api/cases/{case}/prediction").raise_for_status()
    waited = time.perf_counter() - clicked
    run = desk.root / ".pclmix" / "runs" / job
    scores = score(desk.source, run, test)
    return {
        "minutes": minutes,
        "start": ended["start"],
        "first_prediction_s": round(waited, 1),
        "load": round(load_before, 2),
        "steps": read_json(run / RUN)["step"],
        "training_s": round(read_json(run / RUN)["seconds"], 1),
        "dice": round(100 * float(np.nanmean(list(scores.values()))), 2),
        "classes": {name: round(100 * value, 2) for name, value in scores.items()},
        "job": job,
    }


def score(dataset: Dataset, run: Path, cases: list[str]) -> dict[str, float]:
    """Mean Dice of each class over cases."""
    model, found = load(run), []
    for case in cases:
        truth = dataset.read_reference(case)[0]
        predicted = np.where(truth == IGNORE, IGNORE, model.predict(dataset.read_image(case).array))
        found.append([dice(predicted == k, truth == k) for k in range(1, dataset.labels.count)])
    return dict(zip(dataset.labels.foreground, np.nanmean(found, axis=0).tolist(), strict=True))


def measure(name: str, source: Dataset, args: argparse.Namespace) -> None:
    """Everything about one set that its JSON lacks."""
    known = args.out / f"{name}.json"
    found: dict[str, Any] = read_json(known) if known.is_file() else {}
    missing = [minutes for minutes in args.minutes if f"{minutes:g}" not in found.get("cold", {})]
    if "again" in found and not missing:
        return
    root = args.work / name
    shutil.rmtree(root, ignore_errors=True)
    desk, test = Desk(source, root, args.first, args.more), spread(list(source.fold(FOLD).test), args.test)
    desk.make()
    short = args.short
    with serving(root) as client:
        for case in desk.first:
            desk.draw(client, case, desk.begin(case))
        if "again" in found:
            for case in desk.more:
                desk.draw(client, case, found["corrected"][case])
        else:
            pixels = sum(int((desk.strokes[case][desk.begin(case)] >= 0).sum()) for case in desk.first)
            found |= about(source, desk, test) | {"first_pixels": pixels, "cold": {}}
            found["first"] = train(client, desk, test, short, warm=False)
            run = found["first"]["job"]
            client.post("/api/jobs/predict", json={"run": run, "cases": desk.more}).raise_for_status()
            finished(client)
            found["corrected"] = {case: desk.correct(client, case) for case in desk.more}
            found["more_pixels"] = sum(desk.draw(client, case, found["corrected"][case]) for case in desk.more)
            found["again"] = train(client, desk, test, short, warm=True)
            write_json(known, found)
        for minutes in missing:
            found["cold"][f"{minutes:g}"] = train(client, desk, test, minutes, warm=False)
            write_json(known, found)
            print(name, minutes, found["cold"][f"{minutes:g}"]["dice"], flush=True)


def about(source: Dataset, desk: Desk, test: list[str]) -> dict[str, Any]:
    return {
        "dataset": source.name,
        "shape_zhw": list(next(iter(desk.strokes.values())).shape),
        "first_cases": len(desk.first),
        "more_cases": len(desk.more),
        "test_cases": len(test),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--work", type=Path, required=True, help="datasets and runs go here; NAME is replaced")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 2, 5], help="of training from random weights")
    parser.add_argument("--short", type=float, default=1.0, help="minutes of the first training and of the one after")
    parser.add_argument("--first", type=int, default=10, help="cases with strokes at first")
    parser.add_argument("--more", type=int, default=5, help="cases that are corrected")
    parser.add_argument("--test", type=int, default=20, help="test cases of the fold")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for word in args.data:
            name, _, folder = word.partition("=")
            measure(name, Dataset.open(Path(folder or name)), args)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with what is missing")


if __name__ == "__main__":
    main()

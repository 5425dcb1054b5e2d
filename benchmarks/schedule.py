"""How much time scheduling takes: 10,000 tasks on Ray that sleep as long as measured work takes.

`study` runs the executor of crossval, ablate and sweep, and on the workers the function that it sends there, with a
sleep in place of training, and a file in place of predictions and scores. Lengths are those of the runs under
results/acdc (start, training, scoring on an H200), divided by --faster so that the simulation ends: the scheduler has
so many times less time for each. `archive` runs the stream of `predict --cluster` with workers that sleep in place of
reading, prediction and writing, `--milliseconds` a volume; 0 finds out how many volumes a driver can hand out.

Slots are processes, all on this host, so starting them takes long here; it is reported apart. `idle_share` is the share
of the slots' time without a task, from when every slot has its first one until none waits any more.
`makespan_overhead` compares the end of a study with that of the ideal: the next length to the slot that is free first,
at once, from the moments when the slots had started.

    python benchmarks/schedule.py study --out results/cluster/schedule-study.json
    python benchmarks/schedule.py archive --milliseconds 150 --slots 8 --out results/cluster/schedule-archive.json
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pclmix.cluster import predict
from pclmix.cluster.engine import ClusterOptions
from pclmix.cluster.predict import Reply
from pclmix.inference.files import Choices
from pclmix.inference.predictor import About
from pclmix.io.files import read_json, write_json
from pclmix.labels import Labels
from pclmix.studies import execute, work
from pclmix.studies.plan import EVALUATION, Record, Run, Settings, Study
from pclmix.synth.phantom import make_phantom
from pclmix.training.log import environment

ROOT = Path(__file__).parents[1]
LOCAL = ClusterOptions("auto", cores=1)  # the connection that `cluster` has opened is used
PAGE = os.sysconf("SC_PAGE_SIZE")
Spans = list[tuple[float, float]]


def run_lengths() -> list[float]:
    """Seconds of every measured run, from its start to its scores."""
    found = [read_json(path) for path in sorted((ROOT / "results" / "acdc").glob("**/summary.json"))]
    return [60 * run["training_minutes"] + run["start_seconds"] + run["scoring_seconds"] for run in found]


@contextmanager
def cluster(slots: int) -> Iterator[None]:
    """A Ray of this host with so many cores by name: tasks that sleep need none."""
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # loopback alone
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= {"RAY_worker_niceness": "0"}  # with its own 15 other work on the host would come first
    import ray

    ray.init(address="local", num_cpus=slots, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def remembering(done: Sequence[Any]) -> Iterator[list[dict[str, float]]]:
    """Samples the resident memory of this process, without what it shares, every two seconds; `done` grows by task."""
    samples: list[dict[str, float]] = []
    over, began = threading.Event(), time.time()

    def sample() -> None:
        while not over.wait(2.0):
            resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
            mib = (resident - shared) * PAGE / 2**20
            samples.append({"s": round(time.time() - began), "tasks": len(done), "driver_mib": round(mib, 1)})

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def growth(samples: list[dict[str, float]], tasks: int) -> dict[str, Any]:
    """The driver's memory when a tenth of the tasks was done and at the end."""
    after = [one for one in samples if one["tasks"] >= tasks / 10] or samples
    first, last = after[0], after[-1]
    kib = 1024 * (last["driver_mib"] - first["driver_mib"]) / max(1, last["tasks"] - first["tasks"])
    kept = samples[:: max(1, len(samples) // 40)]
    return {
        "driver_mib_at_a_tenth": first["driver_mib"],
        "driver_mib_at_the_end": last["driver_mib"],
        "driver_kib_per_task": round(kib, 3),
        "samples": kept,
    }


def study(tasks: int, slots: int, faster: float) -> dict[str, Any]:
    lengths = [seconds / faster for seconds in run_lengths()]

    def length(run: str) -> float:
        return lengths[int(run[3:]) % len(lengths)]

    def asleep(order: Any, key: str, depot: Any) -> Record:
        def train(*_: Any) -> bool:
            time.sleep(length(order.run.folder))
            return True

        def score(order: Any, places: Any, _: Any) -> bool:
            write_json(places.folder / EVALUATION, {"mean": {"Dice": 0.5}})
            return True

        work._train, work._score = train, score  # type: ignore[assignment]
        return work.on_node(order, key, depot)

    spans: Spans = []
    first: dict[int, float] = {}
    settle = execute._OnCluster._settle

    def noting(self: Any, ref: Any, *rest: Any) -> tuple[str, str]:
        record = self.cluster.get(ref)
        spans.append((record.started, record.seen))
        first[record.pid] = min(record.started, first.get(record.pid, record.started))
        return settle(self, ref, *rest)

    execute.on_node, execute._OnCluster._settle = asleep, noting  # type: ignore[assignment,method-assign]
    with (
        tempfile.TemporaryDirectory() as name,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        cluster(slots),
        remembering(spans) as samples,
    ):
        make_phantom(Path(name) / "data", 2)
        runs = tuple(Run(f"run{k}", 1, Settings("pce", "tiny", (f"seed={k}",)), f"seed={k}") for k in range(tasks))
        of = Study(Path(name) / "study", "sweep", Path(name) / "data", runs)
        console = Console(file=nowhere, force_terminal=True, width=120, height=40)  # the live table is drawn
        began, cpu = time.time(), time.process_time()
        failed = execute.execute(of, runs, execute.ANY, LOCAL, console)
        ended, cpu = time.time(), time.process_time() - cpu
    assert not failed
    mean = float(np.mean(run_lengths()))
    result = report(spans, slots, began, ended)
    begun, ideal = list_schedule([length(run.folder) for run in runs], sorted(first.values())[:slots])
    result["makespan_s"] = round(max(end for _, end in spans) - begun, 1)
    result["ideal_makespan_s"] = round(ideal - begun, 1)
    overhead = max(end for _, end in spans) - ideal
    # A run of its real length has the same overhead before and after it.
    each = overhead * slots / tasks
    return {
        "faster": faster,
        "mean_length_s": round(float(np.mean(lengths)), 4),
        "mean_measured_length_s": round(mean, 1),
        **result,
        "makespan_overhead": round(overhead / (ideal - begun), 5),
        "overhead_s_per_task": round(each, 4),
        "overhead_share_at_measured_length": round(each / (each + mean), 6),
        "driver_cpu_ms_per_task": round(1000 * cpu / tasks, 3),
        **growth(samples, tasks),
    }


def list_schedule(lengths: Sequence[float], free: Sequence[float]) -> tuple[float, float]:
    """When the first slot begins and when all is done, if each length goes to the slot that is free first.

    >>> list_schedule([2, 3, 1], [0, 0.5])
    (0, 3.5)
    """
    slots = list(free)
    heapq.heapify(slots)
    began, ended = slots[0], 0.0
    for length in lengths:
        until = heapq.heappop(slots) + length
        ended = max(ended, until)
        heapq.heappush(slots, until)
    return began, ended


class Sleeper:
    """Replaces pclmix.cluster.predict.Worker: sleeps instead of running the network, one case at a time."""

    seconds = 0.0

    def __init__(self, *_: Any) -> None:
        self.network = threading.Lock()

    def about(self) -> About:
        return About("model", "identity", Labels(("background", "heart"), None), ("MR",), (64, 64), "slice")

    def predict(self, *_: Any) -> Reply:
        with self.network:
            began = time.time()
            time.sleep(self.seconds)
            return Reply(files={"": f"{began} {time.time()}".encode()})


def archive(tasks: int, slots: int, milliseconds: float) -> dict[str, Any]:
    spans: Spans = []

    def noting(folder: Path, files: dict[str, bytes]) -> None:
        began, ended = map(float, files[""].split())
        spans.append((began, ended))

    Sleeper.seconds = milliseconds / 1000
    predict.Worker, predict.carry.write_files = Sleeper, noting  # type: ignore[misc,assignment]
    with tempfile.TemporaryDirectory() as name, cluster(slots), remembering(spans) as samples:
        images, model = Path(name) / "in", Path(name) / "model.onnx"
        images.mkdir()
        model.write_bytes(b"")
        for k in range(tasks):
            (images / f"volume{k:06d}.nii.gz").touch()
        began, cpu = time.time(), time.process_time()
        outcome = predict.predict_on_cluster(model, images, Path(name) / "out", LOCAL, Choices(), device="cpu")
        ended, cpu = time.time(), time.process_time() - cpu
    assert len(outcome.done) == tasks
    found = {"milliseconds": milliseconds, **report(spans, slots, began, ended)}
    return {**found, "driver_cpu_ms_per_volume": round(1000 * cpu / tasks, 3), **growth(samples, tasks)}


def report(spans: Spans, slots: int, began: float, ended: float) -> dict[str, Any]:
    """Use of the slots from when all had begun until the last one was given a task."""
    starts = sorted(start for start, _ in spans)
    first, last = starts[slots - 1], starts[-1]
    busy = sum(max(0.0, min(end, last) - max(start, first)) for start, end in spans)
    steady = sum(start >= first for start, _ in spans)
    idle = slots * (last - first) - busy
    return {
        "tasks": len(spans),
        "slots": slots,
        "wall_s": round(ended - began, 1),
        "until_all_slots_work_s": round(first - began, 1),
        "tasks_per_s": round(steady / (last - first), 1),
        "idle_ms_per_task": round(1000 * idle / steady, 3),
        "idle_share": round(idle / (slots * (last - first)), 5),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("study", "archive"))
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--faster", type=float, default=100.0, help="than the measured runs, for study")
    parser.add_argument("--milliseconds", type=float, default=0.0, help="of a volume, for archive")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "study":
        result = study(args.tasks, args.slots, args.faster)
    else:
        result = archive(args.tasks, args.slots, args.milliseconds)
    result |= {"cores": len(os.sched_getaffinity(0)), "ray": version("ray"), "environment": environment("cpu")}
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()

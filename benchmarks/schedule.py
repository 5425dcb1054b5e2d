"""How much time scheduling takes: 10,000 tasks on Ray that sleep as long as measured work takes.

`study` runs the executor of crossval, ablate and sweep with tasks that sleep in place of training. Their lengths are
those of the runs under results/acdc (start, training, scoring on an H200), divided by --faster so that the simulation
ends: the scheduler has so many times less time for each. `archive` runs the stream of `predict --cluster` with workers
that sleep in place of prediction, `--milliseconds` a volume; 0 finds out how many volumes a driver can hand out.

Slots are processes, all on this host, so starting them takes long here; it is reported apart. Overhead is the share of
the slots' time without a task, from when every slot has its first one until none waits any more.

    python benchmarks/schedule.py study --out results/scale/study.json
    python benchmarks/schedule.py archive --milliseconds 150 --slots 8 --out results/scale/archive.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pclmix.cluster import predict
from pclmix.cluster.engine import ClusterOptions
from pclmix.cluster.worker import Reply
from pclmix.inference.files import Choices
from pclmix.inference.predictor import About
from pclmix.io.files import read_json
from pclmix.labels import Labels
from pclmix.studies import execute
from pclmix.studies.plan import Record, Run, Settings, Study
from pclmix.synth.phantom import make_phantom
from pclmix.training.log import environment

ROOT = Path(__file__).parents[1]
LOCAL = ClusterOptions("auto", cores=1)  # the connection that `cluster` has opened is used
Spans = list[tuple[float, float]]


def run_lengths() -> list[float]:
    """Seconds of every measured run, from its start to its scores."""
    found = [read_json(path) for path in sorted((ROOT / "results" / "acdc").glob("**/summary.json"))]
    return [60 * run["training_minutes"] + run["start_seconds"] + run["scoring_seconds"] for run in found]


@contextmanager
def cluster(slots: int) -> Iterator[None]:
    """A Ray of this host with so many cores by name: tasks that sleep need none."""
    import ray

    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(address="local", num_cpus=slots, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    try:
        yield
    finally:
        ray.shutdown()


def study(tasks: int, slots: int, faster: float) -> dict[str, Any]:
    lengths = [seconds / faster for seconds in run_lengths()]

    def sleep(order: Any, key: str, depot: Any) -> Record:
        began = time.time()
        time.sleep(lengths[int(order.run.folder[3:]) % len(lengths)])
        return Record("finished", "", "", "", 1, os.getpid(), began, time.time())

    spans: Spans = []
    settle = execute._OnCluster._settle

    def noting(self: Any, ref: Any, *rest: Any) -> str:
        record = self.cluster.get(ref)
        spans.append((record.started, record.seen))
        return settle(self, ref, *rest)

    execute.on_node, execute._OnCluster._settle = sleep, noting  # type: ignore[assignment,method-assign]
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w", encoding="utf-8") as nowhere, cluster(slots):
        make_phantom(Path(name) / "data", 2)
        runs = tuple(Run(f"run{k}", 1, Settings("pce", "tiny")) for k in range(tasks))
        of = Study(Path(name) / "study", "sweep", Path(name) / "data", runs)
        began = time.time()
        failed = execute.execute(of, runs, execute.ANY, LOCAL, Console(file=nowhere))
        ended = time.time()
    assert not failed
    mean = float(np.mean(run_lengths()))
    result = report(spans, slots, began, ended)
    # A run of its real length has the same idle time of its slot before it.
    idle = result["idle_ms_per_task"] / 1000
    return {
        "mean_length_s": round(float(np.mean(lengths)), 4),
        "mean_measured_length_s": round(mean, 1),
        **result,
        "overhead_share_at_measured_length": round(idle / (idle + mean), 6),
    }


class Sleeper:
    """In the place of pclmix.cluster.worker.Worker: the network, which one case has at a time, is asleep."""

    seconds = 0.0

    def __init__(self, *_: Any) -> None:
        import threading

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
    with tempfile.TemporaryDirectory() as name, cluster(slots):
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**found, "driver_cpu_ms_per_volume": round(1000 * cpu / tasks, 3), "driver_peak_mib": round(peak, 1)}


def report(spans: Spans, slots: int, began: float, ended: float) -> dict[str, Any]:
    """What the slots did between the first moment when all had begun and the last when one was given a task."""
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
        "overhead_share": round(idle / (slots * (last - first)), 5),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("study", "archive"))
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=24)
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

"""The cost model of docs/scale.md: what a million volumes and a grid of runs need, from measured figures.

Every figure is that of a file under results/, or follows from such figures by the arithmetic here.
benchmarks/results.py puts the tables into the page.

    python benchmarks/scale.py                                                   # prints them
    python benchmarks/scale.py --run RUN --out results/cluster/run-folder.json   # the size of a run's files
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.io.files import read_json, write_json
from pclmix.training.log import environment

ROOT = Path(__file__).parents[1]
MILLION = 10**6
GPUS = (1, 4, 16, 64, 256)
GRID = {"folds": 5, "methods": 13, "seeds": 3}
Rows = tuple[Sequence[str], Sequence[Sequence[str]]]


class Measured:
    """Figures of the files, per volume of ACDC or per run."""

    def __init__(self, root: Path) -> None:
        self.root = root / "results"

    def of(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = read_json(self.root / name)
        return content

    @cached_property
    def slices(self) -> float:
        folder = self.of("predict_folder/acdc.json")
        return float(folder["slices"]) / float(folder["volumes"])

    def stage(self, name: str) -> float:
        """Seconds of a core for reading or writing a volume."""
        folder = self.of("predict_folder/acdc.json")
        return float(folder["stages_alone_s"][name]) / float(folder["volumes"])

    @cached_property
    def files(self) -> float:
        return self.stage("reading") + self.stage("writing")

    @cached_property
    def gpu_network(self) -> float:
        """Seconds of an H200 for a volume: the network and the resizing alone."""
        return self.slices * float(self.of("predict/h200.json")["bf16_graph_ms"]) / 1000

    @cached_property
    def gpu_whole(self) -> float:
        """Seconds of a process with an H200 for a volume, from an array in memory to a label map in memory."""
        return self.slices * float(self.of("predict/h200.json")["array_to_array_ms"]) / 1000

    @cached_property
    def core(self) -> float:
        """Seconds of a core for the network on a volume."""
        cpu = self.of("predict/cpu.json")
        return self.slices * float(cpu["fp32_ms"]) / 1000 * int(cpu["environment"]["threads"])

    @cached_property
    def bytes_in(self) -> float:
        return float(self.of("cluster/archive-speed.json")["bytes_read_per_volume"])

    @cached_property
    def bytes_out(self) -> float:
        return float(self.of("cluster/archive-speed.json")["bytes_written_per_volume"])

    @cached_property
    def driver_rate(self) -> float:
        """Volumes a second that one command hands out and takes back when they take no time."""
        return float(self.of("cluster/schedule-archive-0-ms.json")["tasks_per_s"])

    @cached_property
    def run_seconds(self) -> float:
        """Start, training and scoring: the mean of the runs under results/acdc."""
        found = [read_json(path) for path in sorted((self.root / "acdc").glob("**/summary.json"))]
        return float(np.mean([60 * r["training_minutes"] + r["start_seconds"] + r["scoring_seconds"] for r in found]))


def measured(root: Path) -> Rows:
    m = Measured(root)
    speed, study, archive = (
        m.of(f"cluster/{name}.json") for name in ("archive-speed", "schedule-study", "schedule-archive")
    )
    rows = [
        ["H200, ResNet-50, network alone", f"{1 / m.gpu_network * m.slices:,.0f} slices/s", "predict/h200.json"],
        ["H200, one process, array to label map", f"{m.slices / m.gpu_whole:,.0f} slices/s", "predict/h200.json"],
        ["one CPU core, ResNet-50, network alone", f"{m.slices / m.core:.1f} slices/s", "predict/cpu.json"],
        ["reading a volume, one core", f"{1000 * m.stage('reading'):.1f} ms", "predict_folder/acdc.json"],
        ["writing its label map, one core", f"{1000 * m.stage('writing'):.1f} ms", "predict_folder/acdc.json"],
        ["bytes read for a volume", f"{m.bytes_in / 1e3:,.0f} kB", "cluster/archive-speed.json"],
        ["bytes written for a volume", f"{m.bytes_out / 1e3:,.1f} kB", "cluster/archive-speed.json"],
        [
            "more processor time for a volume with a worker, Ray's included",
            f"{speed['more_cpu_ms_with_1_worker']:.1f} ms",
            "cluster/archive-speed.json",
        ],
        [
            "of it the driver's, volumes of 150 ms",
            f"{archive['driver_cpu_ms_per_volume']:.1f} ms",
            "cluster/schedule-archive.json",
        ],
        ["volumes that one driver hands out", f"{m.driver_rate:,.0f} /s", "cluster/schedule-archive-0-ms.json"],
        ["a run, ACDC on one H200: start, training, scores", f"{m.run_seconds:.0f} s", "acdc/**/summary.json"],
        ["overhead for a run on a cluster", f"{study['overhead_s_per_task']:.3f} s", "cluster/schedule-study.json"],
        ["the driver's processor time for a run", f"{study['driver_cpu_ms_per_task']:.1f} ms", "the same"],
        ["the driver's memory for a run", f"{study['driver_kib_per_task']:.1f} KiB", "the same"],
        [
            "a run before it predicts: two checkpoints, logs (ResNet-50, PCLMix)",
            f"{m.of('cluster/run-folder.json')['bytes'] / 1e6:,.0f} MB",
            "cluster/run-folder.json",
        ],
    ]
    return ["measured", "", "file under results/"], rows


def million(root: Path) -> Rows:
    m = Measured(root)
    hours = MILLION / 3600
    grid = int(np.prod(list(GRID.values())))
    shown = " x ".join(f"{count} {name}" for name, count in GRID.items())
    folder = float(m.of("cluster/run-folder.json")["bytes"])
    ms = float(m.of("cluster/schedule-archive.json")["driver_cpu_ms_per_volume"])
    rows = [
        ["H200 hours, network alone", f"{hours * m.gpu_network:.1f}", ""],
        ["H200 hours, one process for each GPU", f"{hours * m.gpu_whole:.1f}", f"{grid * m.run_seconds / 3600:.1f}"],
        ["or CPU core hours for the network", f"{hours * m.core:,.0f}", ""],
        ["core hours for reading and writing", f"{hours * m.files:.1f}", ""],
        ["core hours of the driver", f"{hours * ms / 1000:.1f}", _driver(m, grid)],
        ["storage read, GB", f"{m.bytes_in * MILLION / 1e9:,.0f}", ""],
        ["storage written, GB", f"{m.bytes_out * MILLION / 1e9:,.1f}", f"{grid * folder / 1e9:,.0f}"],
        [
            "through the driver's network without a shared folder, GB",
            f"{(m.bytes_in + m.bytes_out) * MILLION / 1e9:,.0f}",
            f"{grid * folder / 1e9:,.0f} or more",
        ],
    ]
    return ["", "1,000,000 volumes predicted", f"{grid} runs ({shown})"], rows


def _driver(m: Measured, grid: int) -> str:
    return f"{grid * float(m.of('cluster/schedule-study.json')['driver_cpu_ms_per_task']) / 3.6e6:.4f}"


def gpus(root: Path) -> Rows:
    """Each GPU as fast as one process was measured; everything else follows from the volumes a second."""
    m = Measured(root)
    grid = int(np.prod(list(GRID.values())))
    rows = []
    for count in GPUS:
        rate = count / m.gpu_whole
        rounds = -(-grid // count)
        rows.append(
            [
                str(count),
                f"{rate:,.0f}",
                _time(MILLION / min(rate, m.driver_rate)),
                f"{rate * m.files:.1f}",
                f"{rate * (m.bytes_in + m.bytes_out) / 1e6:,.0f}",
                f"{rate / m.driver_rate:.0%}",
                _time(rounds * m.run_seconds),
            ]
        )
    heads = [
        "H200s",
        "volumes/s",
        "a million, one driver",
        "cores for files",
        "MB/s",
        "of a driver's rate",
        f"{grid} runs",
    ]
    return heads, rows


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def simulated(root: Path) -> Rows:
    m = Measured(root)
    study, archive = m.of("cluster/schedule-study.json"), m.of("cluster/schedule-archive.json")
    pairs: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("tasks", lambda r: f"{r['tasks']:,}"),
        ("slots", lambda r: str(r["slots"])),
        ("mean length of a task", lambda r: _length(r)),
        ("tasks/s", lambda r: f"{r['tasks_per_s']:.1f}"),
        ("slots' time without a task", lambda r: f"{r['idle_share']:.2%}"),
        ("later than the ideal schedule", lambda r: _share(r, "makespan_overhead")),
        ("the same for runs of their real length", lambda r: _share(r, "overhead_share_at_measured_length")),
        (
            "driver's processor time for a task",
            lambda r: f"{r.get('driver_cpu_ms_per_task', r.get('driver_cpu_ms_per_volume')):.1f} ms",
        ),
        (
            "driver's memory at a tenth, at the end",
            lambda r: f"{r['driver_mib_at_a_tenth']:.0f}, {r['driver_mib_at_the_end']:.0f} MiB",
        ),
        ("load of the two cores", lambda r: f"{r['load']:.0f}"),
    ]
    return ["10,000 tasks that sleep", "study", "archive"], [[name, of(study), of(archive)] for name, of in pairs]


def _share(result: dict[str, Any], key: str) -> str:
    return f"{result[key]:.2%}" if key in result else "–"


def _length(result: dict[str, Any]) -> str:
    if "milliseconds" in result:
        return f"{result['milliseconds']:.0f} ms"
    return f"{result['mean_length_s']:.2f} s: {result['mean_measured_length_s']:.0f} s / {result['faster']:.0f}"


def workers(root: Path) -> Rows:
    m = Measured(root)
    speed = m.of("cluster/archive-speed.json")
    rows = [
        [title, *(f"{value[key]:.0f}" for key in ("steady_ms_per_volume", "cpu_ms_per_volume", "load"))]
        for title, value in speed["median"].items()
    ]
    return ["", "ms a volume", "processor ms a volume", "load"], rows


def memory(root: Path) -> Rows:
    content = Measured(root).of("cluster/archive-memory.json")
    rows = [
        [kind, *(f"{of[key]:.1f}" for key in ("mib_at_a_quarter", "mib_at_the_end", "kib_per_file"))]
        for kind, of in content["growth"].items()
    ]
    return [f"{content['files']:,} small files", "MiB at a quarter", "MiB at the end", "KiB a file"], rows


PARTS: dict[str, Callable[[Path], Rows]] = {
    "scale_measured": measured,
    "scale_million": million,
    "scale_gpus": gpus,
    "scale_simulated": simulated,
    "scale_workers": workers,
    "scale_memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--run", type=Path, help="a finished run of a study")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.run is not None:
        sizes = {
            str(path.relative_to(args.run)): path.stat().st_size
            for path in sorted(args.run.rglob("*"))
            if path.is_file()
        }
        result = {"bytes": sum(sizes.values()), "files": sizes, "environment": environment("cpu")}
        write_json(args.out, result)
        return
    for name, make in PARTS.items():
        heads, rows = make(args.root)
        print(f"\n{name}\n" + "\n".join("\t".join(row) for row in (heads, *rows)))


if __name__ == "__main__":
    main()

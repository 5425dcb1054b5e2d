"""An archive predicted by one process and by workers on Ray: seconds, overhead per volume, memory.

`speed` predicts a folder by one process with one and with two threads, then by `--cluster local` with one and two
workers of one core, as often as --rounds says, in turn: on a machine with other work only times next to each other can
be compared. Each is a process of its own. The steady time per volume leaves out the start: it counts from the tenth
finished volume to the last. The processor's time is that of all processes, Ray's included. `memory` samples the
resident memory of all processes while thousands of small files pass. MODEL is a run folder or an exported .onnx file.

    python benchmarks/archive.py speed RUN --images acdc/imagesTr --volumes 200 --out results/cluster/archive-speed.json
    python benchmarks/archive.py memory RUN --files 2000 --workers 2 --out results/cluster/archive-memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.cluster.predict import model_files
from pclmix.data.dataset import Dataset
from pclmix.synth.phantom import make_phantom

WARM = 10  # volumes before the steady state is timed
CONFIGURATIONS = {
    "1 process, 1 thread": (0, 1),
    "1 process, 2 threads": (0, 2),
    "1 worker": (1, 1),
    "2 workers": (2, 1),
}
KINDS = ("driver", "workers", "ray")
PAGE = os.sysconf("SC_PAGE_SIZE")


def fill(folder: Path, images: list[Path], count: int) -> None:
    """`count` hard links to the images, in turn."""
    folder.mkdir()
    for k in range(count):
        image = images[k % len(images)]
        target = folder / f"volume{k:05d}.nii.gz"
        try:
            target.hardlink_to(image)
        except OSError:  # another file system
            target.write_bytes(image.read_bytes())


def small_images(folder: Path, work: Path) -> list[Path]:
    """Volumes of one slice, 64 x 64."""
    import nibabel as nib

    make_phantom(work / "phantom", 2)
    dataset = Dataset.open(work / "phantom")
    folder.mkdir()
    for case in dataset.cases:
        (path,) = dataset.image_paths(case)
        image = nib.load(path)
        array = np.asarray(image.dataobj)
        nib.save(nib.Nifti1Image(array[::2, ::2, :1][:64, :64], image.affine), folder / f"{case}.nii.gz")
    return sorted(folder.glob("*.nii.gz"))


def once(args: argparse.Namespace) -> None:
    """In a process of its own: predict one folder, print what it took."""
    from pclmix.cluster.engine import ClusterOptions
    from pclmix.cluster.predict import predict_on_cluster
    from pclmix.inference import load
    from pclmix.inference.files import Choices, predict_files

    marks: list[tuple[float, float, float]] = []

    def tell(done: int, total: int) -> None:
        everyone = processor_seconds() if done in (WARM, total) else 0.0
        marks.append((time.perf_counter(), time.process_time(), everyone))

    began = time.perf_counter()
    if args.workers:
        options = ClusterOptions("local", cores=1)
        outcome = predict_on_cluster(
            args.model, args.images, args.folder, options, Choices(), device="cpu", workers=args.workers, progress=tell
        )
    else:
        outcome = predict_files(load(args.model, device="cpu"), args.images, args.folder, progress=tell)
    total = time.perf_counter() - began
    outcome.require_good()
    marks = marks[1:]  # the first is reported before any work
    (first, first_cpu, first_all), (last, last_cpu, last_all) = marks[WARM - 1], marks[-1]
    count = len(marks) - WARM
    result = {
        "total_s": total,
        "until_first_s": marks[0][0] - began,
        "steady_ms_per_volume": 1000 * (last - first) / count,
        "cpu_ms_per_volume": 1000 * (last_all - first_all) / count,
        "driver_cpu_ms_per_volume": 1000 * (last_cpu - first_cpu) / count,
    }
    print(json.dumps(result))


def processor_seconds() -> float:
    """Of all processes of this session."""
    session, total = os.getsid(0), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def start(args: argparse.Namespace, images: Path, out: Path, workers: int, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "once", args.model.resolve(), "--images", images, "--folder", out]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray gives its workers the niceness 15, with which they would starve beside other work, one process would not.
    env |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "RAY_worker_niceness": "0"}
    words = [*map(str, command), "--workers", str(workers)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate(timeout=1200)
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}")
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return {name: round(value, 3) for name, value in result.items()}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        images = sorted(args.images.glob("*.nii.gz"))
        fill(work / "in", images, args.volumes)
        for k in range(args.rounds):
            found: dict[str, dict[str, float]] = {}
            for title in args.only or CONFIGURATIONS:
                workers, threads = CONFIGURATIONS[title]
                out = work / f"out-{k}-{workers}-{threads}"
                found[title] = {**finish(start(args, work / "in", out, workers, threads)), "load": os.getloadavg()[0]}
                print(title, found[title], flush=True)
            rounds.append(found)
        maps = list(out.glob("*.nii.gz"))
        read = sum(path.stat().st_size for path in (work / "in").iterdir()) / args.volumes
        written = sum(path.stat().st_size for path in maps) / len(maps)
        slices = sum(_slices(path) for path in images) / len(images)
    median = {
        title: {key: round(float(np.median([one[title][key] for one in rounds])), 3) for key in rounds[0][title]}
        for title in rounds[0]
    }
    return {
        "volumes": args.volumes,
        "slices_per_volume": slices,
        "bytes_read_per_volume": round(read),
        "bytes_written_per_volume": round(written),
        "bytes_of_model": sum(path.stat().st_size for path in model_files(args.model)),
        "median": median,
        **compared(rounds),
        "rounds": rounds,
    }


def compared(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Workers beside one process with one thread, within each round; the median over rounds."""
    alone, wall, cpu = "1 process, 1 thread", "steady_ms_per_volume", "cpu_ms_per_volume"
    found: dict[str, float] = {}
    for workers in ("1 worker", "2 workers"):
        if alone in rounds[0] and workers in rounds[0]:
            faster = [one[alone][wall] / one[workers][wall] for one in rounds]
            more = [one[workers][cpu] - one[alone][cpu] for one in rounds]
            name = workers.replace(" ", "_")
            found[f"times_faster_with_{name}"] = round(float(np.median(faster)), 3)
            found[f"more_cpu_ms_with_{name}"] = round(float(np.median(more)), 2)
    return found


def _slices(path: Path) -> int:
    import nibabel as nib

    return int(nib.load(path).shape[2])


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory by kind of process against files predicted. Ray's store of objects is shared and left out."""
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        fill(work / "in", small_images(work / "small", work), args.files)
        process = start(args, work / "in", work / "out", args.workers, 1)
        began = time.perf_counter()
        try:
            while process.poll() is None:
                done = sum(entry.name.endswith(".nii.gz") for entry in _entries(work / "out"))
                samples.append({"s": time.perf_counter() - began, "files": done, **_resident(process.pid)})
                time.sleep(0.5)
            result = finish(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    half = [one for one in samples if args.files / 4 <= one["files"] < args.files]
    growth = {}
    for kind in KINDS:
        values = np.array([one[kind] for one in half])
        slope = np.polyfit([one["files"] for one in half], values, 1)[0] if len(half) > 2 and values.any() else 0.0
        growth[kind] = {
            "mib_at_a_quarter": round(float(values[0]), 1),
            "mib_at_the_end": round(float(values[-1]), 1),
            "kib_per_file": round(1024 * float(slope), 3),
        }
    kept = samples[:: max(1, len(samples) // 60)]
    rounded = [{key: round(value, 1) for key, value in one.items()} for one in kept]
    return {"files": args.files, "workers": args.workers, **result, "growth": growth, "samples": rounded}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _resident(leader: int) -> dict[str, float]:
    """MiB of the processes of a session, without what they share."""
    found = dict.fromkeys(KINDS, 0.0)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != leader:
                continue
            resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
            title = (folder / "cmdline").read_text(errors="replace")
            kind = "driver" if int(folder.name) == leader else "workers" if title.startswith("ray::Worker") else "ray"
            found[kind] += (resident - shared) * PAGE / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "memory", "once"), help="`once` is what the other two start")
    parser.add_argument("model", type=Path)
    parser.add_argument("--images", type=Path, help="a folder of .nii.gz, for speed")
    parser.add_argument("--volumes", type=int, default=200)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=0, help="0: one process")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", action="append", choices=tuple(CONFIGURATIONS))
    parser.add_argument("--folder", type=Path, help="for `once`: where label maps go")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "once":
        once(args)
        return
    from pclmix.training.log import environment

    result = {"speed": speed, "memory": memory}[args.what](args)
    result = {"model": args.model.suffix or "torch", **result, "cores": len(os.sched_getaffinity(0))}
    text = json.dumps({**result, "environment": environment("cpu")}, indent=2) + "\n"
    print(text if args.out is None else json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=2))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()

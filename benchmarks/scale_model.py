"""What a million studies cost, from measured figures: the tables of docs/scale.md and results/scale/model.json.

A study is one volume like those of results/archive, of cardiac MR. Everything here is arithmetic on result files; what
is assumed (cores for each GPU, speed of a link) is in ASSUMED.

    python benchmarks/scale_model.py            # writes them
    python benchmarks/scale_model.py --check    # fails where one of them differs from the files
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pclmix.io.files import atomic_path, read_json

ROOT = Path(__file__).parents[1]
PAGE, MODEL = ROOT / "docs" / "scale.md", ROOT / "results" / "scale" / "model.json"
STUDIES = 1_000_000
GPUS = (1, 8, 64, 512)
RUNS = 5 * 13 * 3  # folds, methods, seeds
ASSUMED = {"cores_per_gpu": 16, "link_gbit_per_s": 10}
HOUR = 3600.0


def measured() -> dict[str, float]:
    """Every figure that the model is fed with, by its name and from its file."""
    results = ROOT / "results"
    gpu, stages = read_json(results / "predict" / "h200.json"), read_json(results / "archive" / "stages.json")
    small, large = read_json(results / "archive" / "torch.json"), read_json(results / "archive" / "resnet50.json")
    study, driver = read_json(results / "scale" / "study.json"), read_json(results / "scale" / "archive-0ms.json")
    alone = "1 process, 1 thread"
    runs = [read_json(path) for path in sorted((results / "acdc").glob("**/summary.json"))]
    seconds = [60 * run["training_minutes"] + run["start_seconds"] + run["scoring_seconds"] for run in runs]
    return {
        "slices_per_study": small["slices_per_volume"],
        "bytes_read_per_study": small["bytes_read_per_volume"],
        "bytes_written_per_study": small["bytes_written_per_volume"],
        "h200_network_ms_per_slice": gpu["bf16_graph_ms"],
        "h200_array_to_array_ms_per_slice": gpu["array_to_array_ms"],
        "core_resnet10_ms_per_study": small["configurations"][alone]["driver_cpu_ms_per_volume"],
        "core_resnet50_ms_per_study": large["configurations"][alone]["driver_cpu_ms_per_volume"],
        "core_files_ms_per_study": 1000
        * (stages["stages_alone_s"]["reading"] + stages["stages_alone_s"]["writing"])
        / stages["volumes"],
        "driver_studies_per_s": driver["tasks_per_s"],
        "worker_start_s": small["configurations"]["1 worker"]["until_first_s"],
        "run_s": sum(seconds) / len(seconds),
        "runs_measured": len(seconds),
        "scheduling_s_per_run": study["idle_ms_per_task"] / 1000,
    }


def costs(m: dict[str, float]) -> dict[str, float]:
    """Of a million studies."""
    slices = STUDIES * m["slices_per_study"]
    return {
        "h200_hours_network": slices * m["h200_network_ms_per_slice"] / 1000 / HOUR,
        "h200_hours_array_to_array": slices * m["h200_array_to_array_ms_per_slice"] / 1000 / HOUR,
        "core_hours_files": STUDIES * m["core_files_ms_per_study"] / 1000 / HOUR,
        "core_hours_resnet10": STUDIES * m["core_resnet10_ms_per_study"] / 1000 / HOUR,
        "core_hours_resnet50": STUDIES * m["core_resnet50_ms_per_study"] / 1000 / HOUR,
        "gb_read": STUDIES * m["bytes_read_per_study"] / 1e9,
        "gb_written": STUDIES * m["bytes_written_per_study"] / 1e9,
        "driver_hours": STUDIES / m["driver_studies_per_s"] / HOUR,
    }


def hours(m: dict[str, float], c: dict[str, float], gpus: int) -> dict[str, float]:
    """For how long each part would be busy with a million studies; the longest sets the pace."""
    link = (c["gb_read"] + c["gb_written"]) * 8 / ASSUMED["link_gbit_per_s"] / HOUR
    return {
        "GPUs": c["h200_hours_array_to_array"] / gpus + m["worker_start_s"] / HOUR,
        "cores, for files": c["core_hours_files"] / (gpus * ASSUMED["cores_per_gpu"]),
        "one link": link,
        "one driver": c["driver_hours"],
    }


def tables(m: dict[str, float], c: dict[str, float]) -> dict[str, str]:
    cost = [
        ("H200, network alone", f"{c['h200_hours_network']:.1f} GPU hours"),
        ("H200, one array after the other, nothing overlapped", f"{c['h200_hours_array_to_array']:.1f} GPU hours"),
        ("reading and writing files", f"{c['core_hours_files']:.1f} core hours"),
        ("instead of a GPU: `resnet10` on CPUs", f"{c['core_hours_resnet10']:.0f} core hours"),
        ("instead of a GPU: `resnet50` on CPUs", f"{c['core_hours_resnet50']:.0f} core hours"),
        ("read from storage", f"{c['gb_read']:.0f} GB"),
        ("label maps written", f"{c['gb_written']:.1f} GB"),
        (
            "handed out by one driver",
            f"{c['driver_hours']:.1f} hours, {m['driver_studies_per_s']:.0f} studies a second",
        ),
    ]
    lines = ["| a million studies | cost |", "|---|---:|", *(f"| {what} | {value} |" for what, value in cost)]
    names = list(hours(m, c, 1))
    moves = [f"| GPUs | {' | '.join(names)} |", "|---:" * (len(names) + 1) + "|"]
    for gpus in GPUS:
        found = hours(m, c, gpus)
        longest = max(found, key=lambda name: found[name])
        cells = [f"**{found[name]:.2f}**" if name == longest else f"{found[name]:.2f}" for name in names]
        moves.append(f"| {gpus} | {' | '.join(cells)} |")
    return {"cost": "\n".join(lines), "bottleneck": "\n".join(moves), "training": training(m), "archive": archive()}


def training(m: dict[str, float]) -> str:
    lines = [f"| {RUNS} runs on | hours | of them scheduling |", "|---|---:|---:|"]
    for gpus in (1, 8, 64):
        rounds = -(-RUNS // gpus)
        share = m["scheduling_s_per_run"] / (m["run_s"] + m["scheduling_s_per_run"])
        total = rounds * (m["run_s"] + m["scheduling_s_per_run"]) / HOUR
        lines.append(f"| {gpus} H200 | {total:.2f} | {100 * share:.3f} % |")
    return "\n".join(lines)


def archive() -> str:
    """Measured: the single process against workers."""
    folder = ROOT / "results" / "archive"
    found = {name: read_json(folder / f"{name}.json") for name in ("torch", "onnx")}
    titles = list(found["torch"]["configurations"])
    lines = ["| ms a volume, steady | torch | ONNX |", "|---|---:|---:|"]
    for title in titles:
        cells = [f"{one['configurations'][title]['steady_ms_per_volume']:.0f}" for one in found.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    overhead = [f"{one['overhead_ms_per_volume']:+.1f}" for one in found.values()]
    lines.append(f"| overhead of 1 worker against 1 process, 1 thread | {' | '.join(overhead)} |")
    start = [f"{one['configurations']['2 workers']['until_first_s']:.0f} s" for one in found.values()]
    lines.append(f"| until the first volume of 2 workers, start of Ray included | {' | '.join(start)} |")
    return "\n".join(lines)


def page(text: str, parts: dict[str, str]) -> str:
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        if not after:
            raise SystemExit(f"{PAGE} has no <!-- {name} --> ... <!-- /{name} -->")
        text = before + begin + part + end + after
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something differs")
    args = parser.parse_args()
    m = measured()
    c = costs(m)
    content: dict[str, Any] = {
        "measured": m,
        "assumed": ASSUMED,
        "studies": STUDIES,
        "costs": c,
        "hours_by_gpus": {str(gpus): hours(m, c, gpus) for gpus in GPUS},
    }
    wanted = {
        MODEL: json.dumps(_rounded(content), indent=2) + "\n",
        PAGE: page(PAGE.read_text(encoding="utf-8"), tables(m, c)),
    }
    wrong = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if args.check:
        if wrong:
            sys.exit(f"not what the result files give: {', '.join(map(str, wrong))}; run benchmarks/scale_model.py")
        return
    for path in wrong:
        with atomic_path(path) as temporary:
            temporary.write_text(wanted[path], encoding="utf-8")


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    return float(f"{content:.4g}") if isinstance(content, float) else content


if __name__ == "__main__":
    main()

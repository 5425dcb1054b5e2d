"""Sections about speed: the start, the training step, the methods' steps, prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from results_page.tables import NOT_MEASURED, markdown

STEP = {
    "eager_ms": "eager ms",
    "graph_ms": "graph ms",
    "images_per_second": "images/s",
    "peak_memory_gib": "peak GiB",
    "arithmetic_ms": "arithmetic floor ms",
    "memory_ms": "memory floor ms",
}
PREDICTION = {
    "plain_fp32_ms": "plain fp32, a slice at a time",
    "fp32_ms": "fp32",
    "bf16_eager_ms": "bf16",
    "bf16_graph_ms": "bf16, captured",
    "flip_ms": "with flips",
}
PRECISION = {"bf16": "bf16", "32": "fp32", "fp32": "fp32"}


def read(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))}


def shown(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def setting(record: dict[str, Any]) -> str:
    s = record["settings"]
    size, precision = s["size"], PRECISION.get(s["precision"], s["precision"])
    return f"{record['environment']['device']}, {s['net']}, batch {s['batch']}, {size} x {size}, {precision}"


def start_lines(root: Path) -> list[str]:
    """Each file of results/start is a state of the code, in the order of their names."""
    records = list(read(root / "results" / "start", "*.json").values())
    if not records:
        return []
    rows = [
        [r["code"], "yes" if r["import_first"] else "no", shown(r["first_s"], 1), shown(r["again_s"], 1)]
        for r in records
    ]
    last = records[-1]
    text = (
        f"{last['environment']['device']}, `pclmix train` with recipe `{last['recipe']}` on ACDC, seconds from the "
        "command to the end of the first step. The first command finds nothing prepared: it reads, checks and prepares "
        "every slice and compiles every kernel. One run a row; the disk's cache was emptied before, and where the row "
        "says so Python's libraries were then read."
    )
    said = [sentence for r in records for sentence in (r.get("note") or "").split(". ") if sentence]
    notes = ". ".join(dict.fromkeys(sentence.rstrip(".") for sentence in said))
    heads = ["code", "libraries read before", "first command", "again"]
    below = [f"{notes}.", ""] if notes else []
    return ["## From the command to the first step", "", text, "", *markdown(heads, rows), "", *below]


def step_lines(root: Path) -> list[str]:
    """Each file of results/step is a state of the code, in the order of its number."""
    records = read(root / "results" / "step", "*.json")
    if not records:
        return []
    rows = [[stem[2:].replace("-", " "), *(shown(r.get(k), 1) for k in STEP)] for stem, r in records.items()]
    *_, last = records.values()
    text = f"{setting(last)}: PCLMix's whole step, three images for each of the batch."
    return ["## The training step", "", text, "", *markdown(["", *STEP.values()], rows), ""]


def methods_lines(root: Path) -> list[str]:
    """Every method's step on a GPU beside what its passes through the network cost; a table for each network."""
    lines: list[str] = []
    for record in read(root / "results" / "methods", "h200*.json").values():
        rows = []
        for r in record["rows"]:
            ratio = f"{r['ratio']:.2f}" + (" over the limit" if r["ratio"] > record["limit"] else "")
            passes = f"{r['trained']:g} + {r['inferred']:g}"
            maps, peak = shown(r["maps_ms_per_slice"], 0), shown(r["peak_gib"], 1)
            rows.append([f"`{r['method']}`", passes, f"{r['step_ms']:.1f}", f"{r['passes_ms']:.1f}", ratio, maps, peak])
        heads = [
            "method",
            "passes: trained + forward only",
            "step ms",
            "passes ms",
            "ratio",
            "maps ms a slice",
            "peak GiB",
        ]
        commit = record["environment"]["commit"] or "not committed"
        lines += [f"{setting(record)}, commit {commit}:", "", *markdown(heads, rows), ""]
    if not lines:
        return []
    text = (
        "A step beside the passes through the network that it needs, both captured, in one run. Maps are made once. "
        "Where a method stands in two tables of one network it was measured again after a change, and the upper table "
        "is the later one."
    )
    return ["## The methods' steps", "", text, "", *lines]


def prediction_lines(root: Path) -> list[str]:
    records = read(root / "results" / "predict", "*.json")
    if not records:
        return []
    rows = []
    for r in records.values():
        where = r["environment"]["device"]
        where = f"{r['environment']['threads']} CPU cores" if where == "cpu" else where
        digits = 0 if r["fp32_ms"] > 10 else 2
        rows.append([where, *(shown(r.get(k), digits) for k in PREDICTION), f"{r['times_plain']:.1f}"])
    text = "Whole volumes, from slices on the device to label maps at native size, files left out, ms a slice:"
    return ["## Prediction", "", text, "", *markdown(["", *PREDICTION.values(), "times plain"], rows), ""]

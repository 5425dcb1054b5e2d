"""How many strokes are needed: Dice against the share of slices, and of patients, that have strokes.

    python benchmarks/how_many.py ACDC results/how_many --work /tmp/how_many --steps 1000 --recipe plan.yaml

Of the training cases of fold 1, 100, 50, 25 and 10 % of the slices of each case, or of the patients, keep their
strokes; all others stay in the dataset without any. Slices and patients are spread evenly. Each method trains with the
same recipe and number of steps and predicts the test cases of the fold, raw. OUT gets one CSV of per-case values a
run, how_many.json, the table how_many.md and the plot how_many.svg. What is in how_many.json is not measured again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pclmix.data.dataset import Dataset, group_by_patient
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.io.volume import write_labels
from pclmix.labels import IGNORE
from pclmix.report.figures import style
from pclmix.training.log import RUN
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training
from plan import FOLD, score

SHARES = (100, 50, 25, 10)
GOLDEN = 0.618


def spread(total: int, share: int, offset: float) -> np.ndarray:
    """Evenly spread indices of `share` percent of `total` things, at least one; `offset` in [0, 1) moves them."""
    count = max(1, round(total * share / 100))
    return np.unique(((np.arange(count) + offset) * total / count).astype(int))


def reduced(dataset: Dataset, folder: Path, kind: str, share: int) -> tuple[Path, dict[str, int]]:
    """A copy of the dataset by links, in which only some slices or patients keep their strokes; and their number."""
    if not folder.is_dir():
        (folder / "labelsTr").mkdir(parents=True)
        for path in dataset.root.iterdir():
            if path.name != "labelsTr":
                (folder / path.name).symlink_to(path.resolve())
    patients = group_by_patient(dataset.fold(FOLD).train, dataset.patient_pattern)
    kept = {list(patients)[i] for i in spread(len(patients), share, 0.5)}
    slices = cases = 0
    for number, (patient, own) in enumerate(patients.items()):
        for place, case in enumerate(own):
            label, geometry = dataset.read_scribble(case)
            rows = np.arange(len(label))
            if kind == "slices":
                rows = spread(len(label), share, (number * len(own) + place + 1) * GOLDEN % 1)
            elif patient not in kept:
                rows = rows[:0]
            left = np.full_like(label, IGNORE)
            left[rows] = label[rows]
            drawn = int((left >= 0).any(axis=(1, 2)).sum())
            slices, cases = slices + drawn, cases + (drawn > 0)
            target = folder / "labelsTr" / dataset.scribble_path(case).name
            write_labels(target, np.where(left < 0, dataset.labels.ignore, left), geometry)
    for case in dataset.fold(FOLD).test:
        target = folder / "labelsTr" / dataset.scribble_path(case).name
        if not target.exists():
            target.symlink_to(dataset.scribble_path(case).resolve())
    return folder, {"slices_with_strokes": slices, "cases_with_strokes": cases, "patients": len(patients)}


def measure(args: argparse.Namespace, kind: str, share: int, method: str) -> dict[str, Any]:
    """Train, predict and score one run."""
    name = f"{kind}{share}" if share < 100 else "all"
    root, counts = reduced(Dataset.open(args.dataset), args.work / name, kind, share)
    run = args.work / f"{name}_{method}"
    request = TrainRequest(
        root,
        run,
        method=method,
        recipe=str(args.recipe),
        overrides=("engine.seconds=null", f"engine.iterations={args.steps}", f"seed={args.seed}"),
        fold=FOLD,
        device=args.device,
        resume=run.exists(),
    )
    if not run_training(request, Console(stderr=True, quiet=True)):
        raise PclmixError(f"{run} was interrupted; start again to continue it")
    return {
        "kind": kind,
        "share": share,
        "method": method,
        **counts,
        "seconds": read_json(run / RUN)["seconds"],
        **score(run, root, args.device, args.out / f"{name}_{method}.csv"),
    }


def table(rows: list[dict[str, Any]], methods: list[str]) -> str:
    lines = [f"| strokes on | {' | '.join(methods)} |", f"|---|{'---:|' * len(methods)}"]
    for kind in ("slices", "patients"):
        for share in SHARES:
            cells = []
            for method in methods:
                row = find(rows, kind, share, method)
                cells.append("–" if row is None else f"{100 * row['mean']['Dice']:.1f} / {row['mean']['HD95_50']:.1f}")
            lines.append(f"| {share} % of {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def find(rows: list[dict[str, Any]], kind: str, share: int, method: str) -> dict[str, Any] | None:
    """The row of a run; all slices are all patients."""
    wanted = [r for r in rows if (r["share"], r["method"]) == (share, method) and (share == 100 or r["kind"] == kind)]
    return wanted[0] if wanted else None


def plot(rows: list[dict[str, Any]], methods: list[str], path: Path) -> None:
    with style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator

        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.subplots()
        for kind, line in (("slices", "-"), ("patients", "--")):
            for number, method in enumerate(methods):
                found = {share: find(rows, kind, share, method) for share in SHARES}
                points = [(share, 100 * row["mean"]["Dice"]) for share, row in found.items() if row]
                label = f"{method}, share of {kind}"
                axes.plot(*zip(*points, strict=True), line, color=f"C{number}", marker="o", label=label)
        axes.set_xscale("log")
        axes.set_xticks(SHARES, [f"{share} %" for share in SHARES])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="share with strokes; the others are unlabelled", ylabel="Dice, %")
        axes.legend()
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, required=True, help="such as a file of `pclmix plan`")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["pclmix", "pce"])
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, choices=SHARES)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    known = args.out / "how_many.json"
    rows: list[dict[str, Any]] = read_json(known)["runs"] if known.is_file() else []
    for share in args.shares:
        for kind in ("slices", "patients"):
            for method in args.methods:
                if find(rows, kind, share, method) is None:
                    rows.append(measure(args, kind, share, method))
                    write_json(known, {"fold": FOLD, "steps": args.steps, "seed": args.seed, "runs": rows})
                    print(kind, share, method, rows[-1]["mean"]["Dice"], flush=True)
                    with atomic_path(args.out / "how_many.md") as temporary:
                        temporary.write_text(table(rows, args.methods), encoding="utf-8")
                    plot(rows, args.methods, args.out / "how_many.svg")


if __name__ == "__main__":
    main()

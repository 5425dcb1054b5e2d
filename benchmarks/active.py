"""Fewer strokes: Dice against the length of strokes, with different choices of where to draw next.

    python benchmarks/active.py ACDC results/active --work /tmp/active_runs --plot docs/active.svg

A simulated user has 20 training volumes of fold 1, each of another patient, with strokes in the middle slice. PCLMix
trains on them with the plan for a CPU. In each round the user looks at predictions of the 20 volumes, draws strokes of
the same length in pixels, chosen by one of STRATEGIES, and PCLMix goes on from the last model with all strokes so far.
Strokes are simulated on the dense masks, because experts' strokes exist for whole slices only, none far from the heart.
Strategies with the suffix _ring train with the stroke habit `ring` of the background, the others without habits.
After each round the test volumes of the fold are predicted, raw. OUT gets one JSON and one CSV of per-case values for
each strategy and seed. What is in a JSON is not measured again: the script can be stopped at any time.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pclmix.data.dataset import Dataset, group_by_patient, write_dataset_json
from pclmix.errors import PclmixError
from pclmix.inference import load
from pclmix.inference.uncertainty import Examined
from pclmix.io.files import atomic_path, read_json, write_json
from pclmix.io.volume import Geometry, write_labels
from pclmix.labels import IGNORE, IntArray
from pclmix.metrics import dice
from pclmix.report.figures import palette, style
from pclmix.synth.scribble import Style, case_rng, simulate
from pclmix.training.log import ENVIRONMENT
from pclmix.training.plan import plan_dataset
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training
from pclmix.web.assist import fill_between, where_next
from pclmix.web.workspace import entropy_bytes

FOLD = 1
STRATEGIES = {
    "none": "no new strokes, same steps",
    "random": "random slice",
    "between": "random slice, interpolated",
    "slice": "least certain slice of a volume",
    "whole": "slice of a suggestion",
    "spot": "random place",
    "place": "suggested place",
}
RING = "_ring"  #: suffix of a strategy whose trainings know that strokes of the background surround all others
_WINDOW = 0.2  # side of the square drawn in at a place, relative to the shorter side of the image
Strokes = dict[str, IntArray]  #: classes and IGNORE (Z, H, W) of each case
Spot = tuple[str, int, int | None, int | None]  #: case, slice, and row and column unless the whole slice is drawn


@dataclass(frozen=True)
class Volume:
    image: Any  #: (C, Z, H, W)
    mask: IntArray
    geometry: Geometry
    classes: int


class User:
    """Draws strokes that are simulated on dense masks: of each class in a slice, or in a window around a place."""

    def __init__(self, volumes: dict[str, Volume], seed: int) -> None:
        self.volumes, self.seed = volumes, seed

    def strokes(self, spot: Spot) -> tuple[tuple[slice, ...], IntArray]:
        case, z, y, x = spot
        mask = self.volumes[case].mask
        part: tuple[slice, ...] = (slice(z, z + 1), slice(None), slice(None))
        if y is not None and x is not None:
            half = round(_WINDOW / 2 * min(mask.shape[1:]))
            part = (slice(z, z + 1), slice(max(0, y - half), y + half), slice(max(0, x - half), x + half))
        return part, simulate(mask[part], Style(), case_rng(self.seed, f"{case} {z} {y} {x}"))

    def draw(self, spots: Iterator[Spot], labels: Strokes, pixels: int | None) -> int:
        """Draw at these spots, one after another, until `pixels` are drawn; returns the number of spots."""
        drawn = count = 0
        while pixels is None or drawn < pixels:
            spot = next(spots, None)
            if spot is None:
                break
            part, new = self.strokes(spot)
            here = labels[spot[0]][part]
            fresh = (here == IGNORE) & (new != IGNORE)
            here[fresh] = new[fresh]
            drawn, count = drawn + int(fresh.sum()), count + 1
        return count


def choose(strategy: str, found: dict[str, Examined], labels: Strokes, user: User, number: int) -> Iterator[Spot]:
    """Where the user draws in a round, best first."""
    strategy = strategy.removesuffix(RING)
    rng = np.random.default_rng([user.seed, number])
    empty = [(case, z) for case, own in labels.items() for z in np.flatnonzero((own < 0).all(axis=(1, 2))).tolist()]
    if strategy in ("random", "between"):
        yield from ((*empty[i], None, None) for i in rng.permutation(len(empty)))
    elif strategy == "slice":  # by mean entropy, as the strip beside the image shows it; one slice of each volume
        ordered = sorted(empty, key=lambda at: -found[at[0]].quality.slice_entropy[at[1]])
        worst = dict(reversed(ordered))
        yield from ((case, z, None, None) for case, z in ordered if worst[case] == z)
    elif strategy in ("place", "whole"):  # the first suggestion of each case, the least certain one first; then more
        cases = sorted(found, key=lambda case: found[case].quality.certainty)
        lists = [suggestions(case, found[case], labels[case], user.volumes[case]) for case in cases]
        ranked = [places[rank] for rank in range(max(map(len, lists))) for places in lists if rank < len(places)]
        if strategy == "whole":
            ranked = [(case, z, None, None) for case, z in dict.fromkeys(at[:2] for at in ranked) if (case, z) in empty]
        yield from ranked
    elif strategy == "spot":  # in the predicted foreground, or in the middle of a slice without any
        while True:
            case = list(labels)[rng.integers(len(labels))]
            z = int(rng.integers(len(labels[case])))
            inside = np.argwhere(found[case].labels[z] > 0)
            y, x = inside[rng.integers(len(inside))] if len(inside) else np.array(labels[case].shape[1:]) // 2
            yield case, z, int(y), int(x)


def suggestions(case: str, found: Examined, strokes: IntArray, volume: Volume) -> list[Spot]:
    """The places that the workbench lists when this case is open."""
    unsure = entropy_bytes(found.entropy, volume.classes)
    places = where_next(unsure, found.labels, found.second, strokes, volume.geometry.spacing)
    return [(case, place["z"], place["y"], place["x"]) for place in places]


class Study:
    """The volumes and the folders of one seed."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args, self.seed, self.dataset = args, seed, Dataset.open(args.dataset)
        self.top = args.work / f"seed{seed}"
        fold = self.dataset.fold(FOLD)
        patients = list(group_by_patient(fold.train, self.dataset.patient_pattern).values())
        spread = patients[:: max(1, len(patients) // args.volumes)][: args.volumes]
        chosen = [own[i % len(own)] for i, own in enumerate(spread)]  # one frame of each, the first and the second
        self.pool = {case: self._volume(case) for case in chosen}
        self.test = {case: self._volume(case) for case in fold.test[:: args.every]}
        self.user = User(self.pool, seed)

    def _volume(self, case: str) -> Volume:
        mask, geometry = self.dataset.read_reference(case)
        return Volume(self.dataset.read_image(case).array, mask, geometry, self.dataset.labels.count)

    def first(self) -> tuple[Strokes, int]:
        """Strokes in the middle slice of each volume, and the number of slices."""
        labels = {case: np.full(volume.mask.shape, IGNORE, np.int16) for case, volume in self.pool.items()}
        middle = [(case, len(volume.mask) // 2, None, None) for case, volume in self.pool.items()]
        return labels, self.user.draw(iter(middle), labels, None)

    def rounds(self, strategy: str) -> None:
        """All rounds of a strategy; those that its JSON has are not measured again."""
        known = self.args.out / f"{strategy}-{self.seed}.json"
        rows: list[dict[str, Any]] = read_json(known)["rounds"] if known.is_file() else []
        labels, spots = self.first()
        begun, run, ring = pixels_of(labels), None, strategy.endswith(RING)
        for number in range(self.args.rounds + 1):
            folder = self.top / (f"{strategy}{number}" if number else "first" + RING * ring)
            if run is not None and not strategy.startswith("none"):
                wanted = begun + number * self.args.pixels  # in all, so that what one round overshoots the next lacks
                spots += self._draw(strategy, number, run, wanted, labels, folder)
            trained_on, about = self._completed(strategy, labels)
            run = self._train(trained_on, folder, run, ring)
            if len(rows) > number:
                continue
            started = time.process_time()
            cases = self._score(run)
            drawn = pixels_of(labels)
            row = {"round": number, "pixels": drawn, "spots": spots, "dice": mean(cases), **about}
            rows.append(row)
            write_csv(known.with_suffix(".csv"), row, cases)
            write_json(known, {**self._about(strategy), "environment": read_json(run / ENVIRONMENT), "rounds": rows})
            print(
                f"seed {self.seed} {strategy} round {number}: {drawn} pixels, {spots} places, Dice {row['dice']:.4f}, "
                f"{time.process_time() - started:.0f} s of CPU time for the test",
                flush=True,
            )

    def _about(self, strategy: str) -> dict[str, Any]:
        args = self.args
        return {
            "strategy": strategy,
            "seed": self.seed,
            "fold": FOLD,
            "volumes": list(self.pool),
            "steps": {"first": args.first, "each_round": args.steps},
            "lr_each_round": args.lr,
            "pixels_each_round": args.pixels,
        }

    def _draw(self, strategy: str, number: int, run: Path, wanted: int, labels: Strokes, folder: Path) -> int:
        """Draw into `labels` up to `wanted` pixels, or read what was drawn before. Returns the number of places."""
        kept = folder / "strokes.npz"
        if not kept.is_file():
            model = load(run, device="cpu")
            found = {case: model.examine(volume.image) for case, volume in self.pool.items()}
            spots = choose(strategy, found, labels, self.user, number)
            count = self.user.draw(spots, labels, wanted - pixels_of(labels))
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(kept) as temporary, temporary.open("wb") as file:
                np.savez_compressed(file, count=count, **labels)
        with np.load(kept) as content:
            labels.update({case: content[case] for case in labels})
            return int(content["count"])

    def _completed(self, strategy: str, labels: Strokes) -> tuple[Strokes, dict[str, Any]]:
        """The strokes to train on: with `between` also those interpolated, and how many of these are right."""
        if not strategy.startswith("between"):
            return labels, {}
        full, right, added = {}, 0, 0
        for case, own in labels.items():
            volume = self.pool[case]
            filled, _ = fill_between(own, volume.image, volume.geometry.spacing[0])
            full[case] = np.where(own >= 0, own, filled)
            added += int((filled >= 0).sum())
            right += int((filled[filled >= 0] == volume.mask[filled >= 0]).sum())
        return full, {"interpolated_pixels": added, "interpolated_right": right / added if added else None}

    def _train(self, labels: Strokes, folder: Path, start: Path | None, ring: bool) -> Path:
        """The run on a dataset of these strokes, from `start` on, with or without the habit."""
        data, run = folder / "data", folder / "run"
        about = {"channels": self.dataset.channels, "labels": self.dataset.labels, "ending": self.dataset.ending}
        (data / "imagesTr").mkdir(parents=True, exist_ok=True)
        for case, own in labels.items():
            (image,) = self.dataset.image_paths(case)
            if not (data / "imagesTr" / image.name).exists():
                (data / "imagesTr" / image.name).symlink_to(image.resolve())
            path = data / "labelsTr" / self.dataset.scribble_path(case).name
            write_labels(path, self.dataset.labels.encode(own), self.pool[case].geometry)
        write_dataset_json(data, **about, cases=len(labels), name="ACDC")
        plan = self.args.out / "plan.yaml"  # the plan of the first dataset, which finds the habit
        if not plan.is_file():
            text = plan_dataset(Dataset.open(data), device="cpu", minutes=3).text
            with atomic_path(plan) as temporary:
                temporary.write_text(text, encoding="utf-8")
        steps = self.args.steps if start else self.args.first
        overrides = ["engine.seconds=null", f"engine.iterations={steps}", f"seed={self.seed}"]
        overrides += ["habits.background=ring"] if ring else ["data.ring_share=0", "habits.background=none"]
        overrides += [f"optim.lr={self.args.lr}"] if start else []
        request = TrainRequest(
            data,
            run,
            recipe=str(plan),
            overrides=overrides,
            device="cpu",
            resume=run.exists(),
            expect_run=False,
            start_from=start,
        )
        if not run_training(request, Console(stderr=True, quiet=True)):
            raise PclmixError(f"{run} was interrupted; start again to continue it")
        return run

    def _score(self, run: Path) -> list[dict[str, Any]]:
        """Dice of each test volume and class."""
        model, rows = load(run, device="cpu"), []
        for case, volume in self.test.items():
            predicted = model.predict(volume.image)
            names = enumerate(self.dataset.labels.foreground, start=1)
            rows.append({"case": case, **{name: dice(predicted == k, volume.mask == k) for k, name in names}})
        return rows


def pixels_of(labels: Strokes) -> int:
    return sum(int((own >= 0).sum()) for own in labels.values())


def mean(cases: list[dict[str, Any]]) -> float:
    return float(np.nanmean([value for row in cases for key, value in row.items() if key != "case"]))


def write_csv(path: Path, row: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """One line per round and case; lines of earlier rounds stay."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.DictReader(file) if int(line["round"]) < row["round"]]
    for case in cases:
        values = {key: value if isinstance(value, str) else round(value, 5) for key, value in case.items()}
        lines.append({"round": row["round"], "pixels": row["pixels"], **values})
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def plot(out: Path, path: Path) -> None:
    """Mean Dice over the seeds against thousands of drawn pixels; dots are seeds. Right: with the habit."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.8), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, suffix in zip(panels, ("", RING), strict=True):
            _draw_panel(axes, out, suffix)
            title = "with the stroke habit ring" if suffix else "without stroke habits"
            axes.set(xlabel="drawn pixels, thousands", title=title)
        panels[0].set_ylabel("Dice of the test volumes, %")
        panels[0].legend(fontsize=8)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


MARKERS = "xosDv^P"


def _draw_panel(axes: Any, out: Path, suffix: str) -> None:
    colours = palette(len(STRATEGIES) + 1)[1:]
    for number, (strategy, label) in enumerate(STRATEGIES.items()):
        known = [read_json(file) for file in sorted(out.glob(f"{strategy}{suffix}-*.json"))]
        count = min((len(one["rounds"]) for one in known), default=0)
        if count == 0:
            continue
        pixels = np.mean([[row["pixels"] / 1000 for row in one["rounds"][:count]] for one in known], axis=0)
        values = np.array([[100 * row["dice"] for row in one["rounds"][:count]] for one in known])
        line = "-"
        if strategy == "none":  # as far to the right as the others, which have had as many steps
            line, pixels = ":", pixels + np.arange(count) * known[0]["pixels_each_round"] / 1000
        colour, marker = colours[number], MARKERS[number]
        axes.plot(pixels, values.mean(axis=0), line, color=colour, marker=marker, markersize=5, label=label)
        for own in values:
            axes.plot(pixels, own, ".", color=colour, alpha=0.6, markersize=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    choices = [*STRATEGIES, *(name + RING for name in STRATEGIES)]
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=choices)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--volumes", type=int, default=20, help="training volumes")
    parser.add_argument("--every", type=int, default=1, help="test every n-th volume of the fold")
    parser.add_argument("--pixels", type=int, default=2500, help="pixels drawn in a round")
    parser.add_argument("--first", type=int, default=400, help="steps of the first training")
    parser.add_argument("--steps", type=int, default=100, help="steps of each further one")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of each further one")
    parser.add_argument("--plot", type=Path, help="default: OUT/active.svg")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        study = Study(args, seed)
        for strategy in args.strategies:
            study.rounds(strategy)
            plot(args.out, args.plot or args.out / "active.svg")


if __name__ == "__main__":
    main()

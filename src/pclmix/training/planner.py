"""Settings from the data: what a survey, a device and a number of minutes ask for, written as a commented recipe.

The same dataset, device kind, minutes and rate give the same plan, byte for byte. Figures here come from measurements
on a few datasets (docs/plan.md); a person who knows better changes the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pclmix.config import Config, config_from_text
from pclmix.data.habits import classes_with
from pclmix.data.preprocess import Preprocessing
from pclmix.data.survey import Survey, strokes_kept
from pclmix.errors import PclmixError
from pclmix.training.plan_text import Row, describe_data, deviation_lines, named, yaml_line, yaml_lines

MINUTES = 5.0  #: where none are given
SIDE = 32  #: both sides of what a network sees are multiples of it, the coarsest stride of every ResNet
#: Share of the minutes that a plan gives to the steps; the rest is for reading, saving and drawing.
SHARE = 0.9
#: Pixels of training images per second of PCLMix on a device nobody has timed: resnet10 on two cores at 64 x 64
#: (the demo), resnet50 on a middling GPU.
RATE = {"cpu": 110_000.0, "cuda": 8_000_000.0}
#: Steps below which a larger image is not worth its time.
STEPS = {"cpu": 400, "cuda": 3000}
BATCH = {"cpu": 4, "cuda": 12}
#: Least and most pixels that the network sees at once.
PIXELS = {"cpu": (64 * 64, 320 * 320), "cuda": (192 * 192, 512 * 512)}
ENLARGE = 2.0  #: small images are enlarged by at most this: a network of stride 32 sees nothing in 35 x 50 pixels
CLOSE = 0.9  #: share of the largest scale that is as good
BYTES_PER_PIXEL = 12_000  #: of GPU memory a pixel of the batch: 8 GiB at 256 x 256, batch 12, resnet50, bf16
#: A stroke of fewer pixels at working size says nothing of its structure's shape.
SHORTEST = 4.0
SHRINK, PATCHED = 8.0, 4  #: reduction from which patches are used at all, and patches along a side at most
DIM = 0.2  #: share of dim slices from which on intensities are scaled per volume
MARGIN = 0.25  #: of a CT window on each side, of its width


@dataclass(frozen=True)
class Device:
    """What a plan knows of a device."""

    kind: Literal["cpu", "cuda"]
    memory: float = 0.0  #: of the GPU, in bytes
    bf16: bool = True  #: whether it is faster than 32 bits; on a CPU only timing tells
    rate: float | None = None  #: pixels per second, where it was timed

    def __str__(self) -> str:
        return "a CPU" if self.kind == "cpu" else f"a GPU of {self.memory / 2**30:.0f} GiB"


@dataclass(frozen=True)
class DataPlan:
    """A commented recipe, what it resolves to, and notes for the user."""

    text: str
    notes: tuple[str, ...]
    steps: int  #: about so many in the time given

    def config(self, method: str | None = None, overrides: Sequence[str] = ()) -> Config:
        return config_from_text(self.text, "plan", method, overrides)


def make_data_plan(found: Survey, device: Device, minutes: float = MINUTES) -> DataPlan:
    """The plan for a dataset on a device."""
    if not minutes > 0 or not math.isfinite(minutes):
        raise PclmixError(f"--minutes {minutes}: a number above 0 is needed")
    kind = device.kind
    seconds = max(1.0, round(60 * SHARE * minutes, 1))
    rate = device.rate or RATE[kind]
    area = rate * seconds / (BATCH[kind] * STEPS[kind])
    least, most = map(float, PIXELS[kind])
    if kind == "cuda":
        most = min(most, device.memory / BYTES_PER_PIXEL / BATCH[kind]) if device.memory else most
    sizes = _sizes(found, min(max(area, least), max(most, least)))
    steps = max(1, int(rate * seconds / (BATCH[kind] * math.prod(sizes.seen))))
    intensity = _intensity(found)
    look = Preprocessing(sizes.size, aspect="keep")
    kept, lost = strokes_kept(found.dataset, found.cases, look)
    sections: dict[str, list[Row]] = {
        "": _network(device),
        "data": [*sizes.rows(), *intensity, *_ring(found, sizes.patch is not None)],
        "augment": _augment(found, steps),
        "optim": _optim(kind),
        "engine": _engine(device, seconds, minutes, steps),
    }
    habits = {name: list(words) for name, words in _habits(found).items()}
    timed = "timed here" if device.rate is not None else "not timed here: `pclmix train` does so"
    lines = [
        f"# Plan for {found.dataset.name} on {device}, {minutes:g} minutes. Change what you know better.",
        *describe_data(found),
        f"# {kept:.1%} of the drawn pixels are shown at working size; strokes that vanish: {named(lost) or 'none'}.",
        f"# About {steps} steps of PCLMix ({timed}).",
        *yaml_lines(sections),
    ]
    lines += [yaml_line("habits", habits, _why_habits(found))] if habits else []
    lines += deviation_lines("pclmix", _pclmix(kind, steps))
    return DataPlan("\n".join(lines) + "\n", tuple(_notes(found, sizes.size, kept, lost)), steps)


@dataclass(frozen=True)
class _Sizes:
    size: tuple[int, int]
    patch: tuple[int, int] | None
    why: str
    why_patch: str

    @property
    def seen(self) -> tuple[int, int]:
        return self.patch or self.size

    def rows(self) -> Iterator[Row]:
        yield "size", list(self.size), self.why
        if self.patch is not None:
            yield "patch", list(self.patch), self.why_patch
        yield "aspect", "keep", "a slice is scaled until it fits and padded: things keep their shape"


def _sizes(found: Survey, area: float) -> _Sizes:
    """Working size, and the patch where whole slices would lose what the strokes show."""
    _, height, width = found.shape
    size = fitting_size((height, width), area)
    shrink = max(height / size[0], width / size[1])
    sides = [side for k in range(1, found.dataset.labels.count) if (side := found.extent(k)) is not None and side > 2]
    short = min(sides, default=math.inf) / shrink
    median = f"the median slice is {height} x {width}"
    if shrink <= 2 or (short >= SHORTEST and shrink <= SHRINK):
        word = (
            f"{shrink:.2g} times smaller" if shrink > 1 else f"{1 / shrink:.2g} times larger" if shrink < 1 else "kept"
        )
        return _Sizes(size, None, f"{median}: {word}, for the time and memory there are; multiples of {SIDE}", "")
    side = max(SIDE, int(math.sqrt(area)) // SIDE * SIDE)
    patch = min(side, -(-height // SIDE) * SIDE), min(side, -(-width // SIDE) * SIDE)
    factor = min(1.0, PATCHED * patch[0] / height, PATCHED * patch[1] / width)
    whole = max(patch[0], round(height * factor)), max(patch[1], round(width * factor))
    why = f"at {size[0]} x {size[1]} pixels the shortest strokes would be {short:.1f} pixels long"
    return _Sizes(whole, patch, f"{median}", f"{why}, so the network sees parts of a slice")


def fitting_size(shape: tuple[int, int], area: float) -> tuple[int, int]:
    """The size (H, W) of at most `area` pixels, in multiples of SIDE, at which slices of `shape` are largest.

    They are enlarged by ENLARGE at most. A smaller size is taken where it costs a few percent of the scale.
    """
    limit = max(SIDE, int(math.sqrt(area)) * 4)
    sides = range(SIDE, limit + SIDE, SIDE)
    fits = [(h, w) for h in sides for w in sides if h * w <= max(area, SIDE * SIDE)]

    def scale(size: tuple[int, int]) -> float:
        return min(size[0] / shape[0], size[1] / shape[1], ENLARGE)

    enough = CLOSE * max(map(scale, fits))
    return min((size for size in fits if scale(size) >= enough), key=lambda s: (s[0] * s[1], -scale(s), s))


def _network(device: Device) -> list[Row]:
    if device.kind == "cpu":
        return [
            ("net", "resnet10", "thin, 16 to 128 channels: a step takes a tenth of a resnet50's time"),
            ("encoder.weights", "none", "there are none for resnet10"),
        ]
    if device.memory and device.memory < 6 * 2**30:
        return [
            ("net", "resnet18", f"the GPU has {device.memory / 2**30:.0f} GiB"),
            ("encoder.weights", "imagenet", "public weights, downloaded once; a file of yours works offline"),
        ]
    return [
        ("net", "resnet50", "the paper's"),
        ("encoder.weights", "imagenet", "public weights, downloaded once; a file of yours works offline"),
    ]


def _intensity(found: Survey) -> list[Row]:
    under = found.under_strokes
    if found.hounsfield and under is not None:
        low, high = under
        margin = MARGIN * max(high - low, 100.0)
        window = [round(max(low - margin, found.low[0]) / 10) * 10, round(min(high + margin, found.high[0]) / 10) * 10]
        why = f"values look like Hounsfield units, {found.low[0]:.0f} to {found.high[0]:.0f}: a fixed range"
        strokes = f"structures' strokes lie on {low:.0f} to {high:.0f}, and a margin"
        return [("intensity", "window", why), ("window", window, strokes)]
    if found.dim > DIM:
        share = f"{found.dim:.0%} of the slices span less than half of their volume's range"
        return [("intensity", "volume", f"{share}: scaled alone they would be noise")]
    if found.colour and found.low and max(found.high) <= 255:
        return [
            ("intensity", "window", "colours keep their ratio"),
            ("window", [0, 255], "8 bits"),
        ]
    return [("intensity", "slice", "slices span much of their volume's range: each is scaled to [0, 1]")]


def _habits(found: Survey) -> dict[str, tuple[str, ...]]:
    """The habits stated with the data, and a ring that the strokes show."""
    habits = dict(found.dataset.habits)
    if not any("ring" in words for words in habits.values()):
        seen = [report.name for report in found.habits if report.habit == "ring" and not report.stated]
        habits |= {name: (*habits.get(name, ()), "ring") for name in seen[:1]}
    return habits


def _why_habits(found: Survey) -> str:
    if _habits(found) == dict(found.dataset.habits):
        return "as dataset.json states them"
    seen = next(report for report in found.habits if report.habit == "ring" and not report.stated)
    held = f"{seen.strokes.held} of {seen.strokes.tested} slices"
    return f"the strokes of {seen.name} go round all others in {held}; take it out if that is not how they were drawn"


def _ring(found: Survey, patches: bool) -> list[Row]:
    if patches or not classes_with("ring", _habits(found), found.dataset.labels):
        return []
    return [("ring_share", 0.005, "of the pixels outside all strokes: they are of the class drawn round them")]


def _augment(found: Survey, steps: int) -> list[Row]:
    turns = 0.5 if steps >= 2000 and not found.pictures else 0.0
    if found.pictures:
        why = "pictures have a right way up"
    else:
        why = "quarter turns and flips" if turns else "few steps do not learn every turn"
    return [
        ("quarter_turns", turns, why),
        ("rotate", 0.5 if turns else 0.7, ""),
        ("degrees", 20, ""),
        ("scale", 0.25, "zoom and shift show the network what lies beyond the strokes"),
        ("shift", 0.1, ""),
    ]


def _optim(kind: str) -> list[Row]:
    if kind == "cpu":
        return [
            ("name", "adamw", "few steps from random weights: as the demo, where each line was measured"),
            ("lr", 0.006, ""),
            ("lr_end", 0.00003, ""),
            ("warmup", 0.05, ""),
            ("clip", 1, ""),
            ("weight_decay", 0.01, ""),
        ]
    return [
        ("name", "sgd", "the paper's optimiser and schedule"),
        ("lr", 0.03, ""),
        ("lr_end", 0.001, ""),
        ("momentum", 0.9, ""),
        ("weight_decay", 0.0005, ""),
    ]


def _engine(device: Device, seconds: float, minutes: float, steps: int) -> list[Row]:
    """Batch, time and what follows from the number of steps."""
    kind = device.kind
    ema = round(min(0.998, max(0.9, 1 - 12 / steps)), 3)
    rows: list[Row] = [
        ("batch", BATCH[kind], ""),
        ("seconds", seconds, f"of {minutes:g} minutes; the rest is for reading, saving and drawing"),
        ("ema", ema, f"averages the weights of about {1 / (1 - ema):.0f} steps"),
    ]
    if device.bf16:
        why = "twice as fast as 32" if kind == "cuda" else "faster than 32 when timed here"
        rows.append(("precision", "bf16", why))
    return [*rows, ("log_every", 5 if kind == "cpu" else 50, ""), ("save_every", 200 if kind == "cpu" else 1000, "")]


def _pclmix(kind: str, steps: int) -> list[Row]:
    ramp = (
        "params.ramp",
        round(min(0.5, 480 / steps), 2),
        "contrast and consistency wait for a first idea of the classes",
    )
    if kind == "cuda":
        return [ramp]
    return [
        ("params.anchors", 64, "small maps hold few pixels at stride 8"),
        ("params.queue", 50, ""),
        ("params.embedding", 32, ""),
        ("params.swin_width", 12, "with embedding, a quarter of the time of a step"),
        ramp,
    ]


def _notes(found: Survey, size: tuple[int, int], kept: float, lost: list[tuple[str, str]]) -> Iterator[str]:
    yield f"{kept:.1%} of the drawn pixels are kept at {size[0]} x {size[1]}"
    if lost:
        yield f"warning: no stroke is left of {named(lost)}: use a larger data.size"
    names, cases = found.dataset.labels.names, found.cases_drawn
    absent = [
        f"{name} ({len(found.cases) - cases[k]} cases)" for k, name in enumerate(names) if cases[k] < len(found.cases)
    ]
    if absent:
        yield f"cases without a stroke of a class: {', '.join(absent)}"

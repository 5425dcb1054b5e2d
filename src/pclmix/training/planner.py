"""Settings from the data: a commented recipe from a survey, a device and a time budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from pclmix.config import Config, config_from_text
from pclmix.data.habits import classes_with
from pclmix.data.preprocess import Preprocessing
from pclmix.data.survey import Survey, strokes_kept
from pclmix.training.request import require_minutes

Row = tuple[str, Any, str]  #: key, value, reason
_COLUMN = 30  # column of the reasons


def describe_data(found: Survey) -> Iterator[str]:
    """The survey as comments."""
    (z, h, w), names = found.shape, found.dataset.labels.names
    looked = f"{found.total} cases"
    if len(found.cases) < found.total:
        looked = f"{len(found.cases)} of {looked} looked at"
    kind = "pictures" if found.pictures else f"volumes of {z} slices (median)"
    (low_h, low_w), (high_h, high_w) = found.smallest, found.largest
    yield f"# {looked}: {kind}, {h} x {w} pixels ({low_h} x {low_w} to {high_h} x {high_w}),"
    yield f"# channels: {', '.join(found.dataset.channels)}."
    if found.unit == "mm":
        yield "# Spacing {:.4g} x {:.4g} x {:.4g} mm (z, y, x); slices are trained on one by one.".format(
            *found.spacing
        )
    ranges = ", ".join(f"{low:g} to {high:g}" for low, high in zip(found.low, found.high, strict=True))
    yield f"# Intensities {ranges}."
    cases, drawn = found.cases_drawn, found.drawn
    strokes = ", ".join(f"{name} in {cases[k]} cases ({drawn[k]} pixels)" for k, name in enumerate(names))
    yield f"# Strokes: {strokes}."


def named(lost: Sequence[tuple[str, str]]) -> str:
    """The first few classes and cases."""
    more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    return ", ".join(f"{name} in {case}" for name, case in lost[:5]) + more


def yaml_lines(sections: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Sections of a recipe; the unnamed one is the top level, with keys such as `section.key`."""
    for section, rows in sections.items():
        if section:
            yield f"{section}:"
        for key, value, why in rows:
            parent, _, last = key.rpartition(".")
            if parent:
                yield f"{parent}:"
            yield yaml_line(last, value, why, "  " if parent or section else "")


def yaml_line(key: str, value: Any, why: str, indent: str = "") -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).split("\n")[0]
    return _reasoned(f"{indent}{key}: {text}", why)


def deviation_lines(method: str, rows: Sequence[Row]) -> Iterator[str]:
    """The deviations of a method."""
    yield "deviations:"
    yield f"  {method}:"
    yield from (_reasoned(f"    - {key}={value}", why) for key, value, why in rows)


def _reasoned(start: str, why: str) -> str:
    return f"{start:<{_COLUMN}} # {why}" if why else start


MINUTES = 5.0  #: if none are given
SIDE = 32  #: divides both sides of the network input: the coarsest stride of every ResNet
#: Share of the minutes for training steps; the rest is for reading, saving and drawing.
SHARE = 0.9
#: Pixels of training images per second of PCLMix on an untimed device: resnet10 on two cores at 64 x 64 (the demo),
#: resnet50 on a mid-range GPU.
RATE = {"cpu": 110_000.0, "cuda": 8_000_000.0}
#: Minimum number of steps for a larger image size.
STEPS = {"cpu": 400, "cuda": 3000}
BATCH = {"cpu": 4, "cuda": 12}
#: Minimum and maximum number of input pixels.
PIXELS = {"cpu": (64 * 64, 320 * 320), "cuda": (192 * 192, 512 * 512)}
ENLARGE = 2.0  #: maximum enlargement of small images, which suit a network of stride 32 badly
CLOSE = 0.9  #: share of the largest scale that counts as equal
BYTES_PER_PIXEL = 12_000  #: bytes of GPU memory per pixel of the batch: 8 GiB at 256 x 256, batch 12, resnet50, bf16
#: Minimum stroke length in pixels at working size to show the shape of a structure.
SHORTEST = 4.0
SHRINK, PATCHED = 8.0, 4  #: minimum reduction for patches, and maximum number of patches along a side
DIM = 0.2  #: share of dim slices above which intensities are scaled per volume
MARGIN = 0.25  #: margin of a CT window on each side, as a share of its width


@dataclass(frozen=True)
class Device:
    """Properties of a device for planning."""

    kind: Literal["cpu", "cuda"]
    memory: float = 0.0  #: of the GPU, in bytes
    bf16: bool = True  #: whether bf16 is faster than 32 bits; on a CPU only timing shows this
    rate: float | None = None  #: pixels per second, if timed

    def __str__(self) -> str:
        return "a CPU" if self.kind == "cpu" else f"a GPU of {self.memory / 2**30:.0f} GiB"


@dataclass(frozen=True)
class DataPlan:
    """A commented recipe, what it resolves to, and notes for the user."""

    text: str
    strokes: tuple[str, ...]  #: what is kept of them at working size, which training says of all its cases
    notes: tuple[str, ...]
    steps: int  #: approximate number of steps in the given time

    def config(self, method: str | None = None, overrides: Sequence[str] = ()) -> Config:
        return config_from_text(self.text, "plan", method, overrides)


def make_data_plan(found: Survey, device: Device, minutes: float = MINUTES) -> DataPlan:
    """The plan for a dataset on a device."""
    require_minutes(minutes)
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
    timed = "timed here" if device.rate is not None else "not timed here; `pclmix train` times them"
    lines = [
        f"# Plan for {found.dataset.name} on {device}, {minutes:g} minutes. Edit any value.",
        *describe_data(found),
        f"# {kept:.1%} of the drawn pixels are shown at working size; vanished strokes: {named(lost) or 'none'}.",
        f"# About {steps} steps of PCLMix ({timed}).",
        *yaml_lines(sections),
    ]
    lines += [yaml_line("habits", habits, _why_habits(found))] if habits else []
    lines += deviation_lines("pclmix", _pclmix(kind, steps))
    strokes, notes = tuple(_strokes(sizes.size, kept, lost)), tuple(_absent(found))
    return DataPlan("\n".join(lines) + "\n", strokes, notes, steps)


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
        yield "aspect", "keep", "a slice is scaled to fit and padded, which keeps shapes"


def _sizes(found: Survey, area: float) -> _Sizes:
    """Working size, and the patch if whole slices would lose strokes."""
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
        return _Sizes(size, None, f"{median}: {word}, limited by time and memory; multiples of {SIDE}", "")
    side = max(SIDE, int(math.sqrt(area)) // SIDE * SIDE)
    patch = min(side, -(-height // SIDE) * SIDE), min(side, -(-width // SIDE) * SIDE)
    factor = min(1.0, PATCHED * patch[0] / height, PATCHED * patch[1] / width)
    whole = max(patch[0], round(height * factor)), max(patch[1], round(width * factor))
    why = f"at {size[0]} x {size[1]} pixels the shortest strokes would be {short:.1f} pixels long"
    return _Sizes(whole, patch, f"{median}", f"{why}, so the network sees parts of a slice")


def fitting_size(shape: tuple[int, int], area: float) -> tuple[int, int]:
    """The size (H, W) of at most `area` pixels, in multiples of SIDE, that maximises the scale of slices of `shape`.

    The scale is at most ENLARGE. A smaller size is preferred if it costs only a few percent of the scale.
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
            ("net", "resnet10", "thin, 16 to 128 channels: a step takes a tenth of the time of resnet50"),
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
        strokes = f"strokes of structures have {low:.0f} to {high:.0f}; plus a margin"
        return [("intensity", "window", why), ("window", window, strokes)]
    if found.dim > DIM:
        share = f"{found.dim:.0%} of the slices span less than half of their volume's range"
        return [("intensity", "volume", f"{share}: scaled on their own they would be mostly noise")]
    if found.colour and found.low and max(found.high) <= 255:
        return [
            ("intensity", "window", "colours keep their ratio"),
            ("window", [0, 255], "8 bits"),
        ]
    if found.pictures:
        return [("intensity", "slice", "brightness differs between pictures: each is scaled to [0, 1]")]
    return [("intensity", "slice", "slices span much of their volume's range: each is scaled to [0, 1]")]


def _habits(found: Survey) -> dict[str, tuple[str, ...]]:
    """The habits stated with the data, and a ring found in the strokes."""
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
    return f"the strokes of {seen.name} surround all others in {held}; remove it if that is wrong"


def _ring(found: Survey, patches: bool) -> list[Row]:
    if patches or not classes_with("ring", _habits(found), found.dataset.labels):
        return []
    return [("ring_share", 0.005, "share of the pixels outside all strokes that get the class of the ring")]


def _augment(found: Survey, steps: int) -> list[Row]:
    turns = 0.5 if steps >= 2000 and not found.pictures else 0.0
    if found.pictures:
        why = "pictures have a fixed orientation"
    else:
        why = "quarter turns and flips" if turns else "too few steps to learn every orientation"
    return [
        ("quarter_turns", turns, why),
        ("rotate", 0.5 if turns else 0.7, "share of the images that are turned a little"),
        ("degrees", 20, "largest of these turns"),
        ("scale", 0.25, "zoom and shift show the network what lies beyond the strokes"),
        ("shift", 0.1, "of the side"),
    ]


def _optim(kind: str) -> list[Row]:
    if kind == "cpu":
        return [
            ("name", "adamw", "few steps from random weights: the settings of recipe demo, which has the measurements"),
            ("lr", 0.006, "high, for few steps; measured for recipe demo"),
            ("lr_end", 0.00003, "it falls to almost 0"),
            ("warmup", 0.05, "share of the steps with a linear rise, which helped recipe demo"),
            ("clip", 1, "largest norm of the gradient, likewise"),
            ("weight_decay", 0.01, "the default of AdamW"),
        ]
    return [
        ("name", "sgd", "the paper's optimiser and schedule"),
        ("lr", 0.03, "as in the paper"),
        ("lr_end", 0.001, "as in the paper"),
        ("momentum", 0.9, "as in the paper"),
        ("weight_decay", 0.0005, "as in the paper"),
    ]


def _engine(device: Device, seconds: float, minutes: float, steps: int) -> list[Row]:
    """Batch, time and settings that depend on the number of steps."""
    kind = device.kind
    ema = round(min(0.998, max(0.9, 1 - 12 / steps)), 3)
    rows: list[Row] = [
        ("batch", BATCH[kind], "few images, which leaves time for more steps" if kind == "cpu" else "the paper's"),
        ("seconds", seconds, f"of {minutes:g} minutes; the rest is for reading, saving and drawing"),
        ("ema", ema, f"averages the weights of about {1 / (1 - ema):.0f} steps"),
    ]
    if device.bf16:
        why = "twice as fast as 32" if kind == "cuda" else "faster than 32 when timed here"
        rows.append(("precision", "bf16", why))
    every = (5, 200) if kind == "cpu" else (50, 1000)
    rows.append(("log_every", every[0], "steps between lines of metrics.jsonl"))
    return [*rows, ("save_every", every[1], "steps between checkpoints, from which a run is resumed")]


def _pclmix(kind: str, steps: int) -> list[Row]:
    ramp = (
        "params.ramp",
        round(min(0.5, 480 / steps), 2),
        "contrast and consistency start once classes are roughly learnt",
    )
    if kind == "cuda":
        return [ramp]
    return [
        ("params.anchors", 64, "small maps hold few pixels at stride 8"),
        ("params.queue", 50, "prototypes of a class: few steps fill no longer queue"),
        ("params.embedding", 32, "fits the thin network"),
        ("params.swin_width", 12, "this and embedding: a step takes a quarter less time"),
        ramp,
    ]


def _strokes(size: tuple[int, int], kept: float, lost: list[tuple[str, str]]) -> Iterator[str]:
    yield f"{kept:.1%} of the drawn pixels are kept at {size[0]} x {size[1]}"
    if lost:
        yield f"warning: no stroke is left of {named(lost)}: use a larger data.size"


def _absent(found: Survey) -> Iterator[str]:
    names, cases = found.dataset.labels.names, found.cases_drawn
    absent = [
        f"{name} ({len(found.cases) - cases[k]} cases)" for k, name in enumerate(names) if cases[k] < len(found.cases)
    ]
    if absent:
        yield f"cases without a stroke of a class: {', '.join(absent)}"

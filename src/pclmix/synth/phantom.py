"""The phantom: a synthetic short-axis cardiac dataset for the demo and for tests.

One patient is drawn from a generator and rendered relaxed or contracted. Lengths are in millimetres from the middle of
the image, angles in radians, intensities 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt
from scipy import ndimage

from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES, default_splits, write_dataset_json, write_splits
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_folder
from pclmix.io.volume import Geometry, write_labels
from pclmix.labels import IntArray, Labels
from pclmix.synth.scribble import Style, case_rng, simulate
from pclmix.synth.strokes import wobble

RV, MYO, LV = 1, 2, 3

Array = npt.NDArray[np.float64]
Point = tuple[float, float]


@dataclass(frozen=True)
class Blob:
    """A round structure: centre, radius, outline, brightness; `wall` mm of `wall_grey` around it (0: none)."""

    centre: Point
    radius: float
    outline: Array
    grey: float
    wall: float
    wall_grey: float


@dataclass(frozen=True)
class Body:
    """One patient: everything that does not change between the two frames."""

    shape: tuple[int, int, int]  #: Z, H, W
    spacing: tuple[float, float, float]  #: mm
    origin: tuple[float, float, float]
    centre: Point
    turn: float  #: where the RV lies, radians
    cavity: float  #: LV radius at the base, relaxed, mm
    wall: float
    rv_size: float  #: RV radius over the outer LV radius
    top: float  #: slices above the base: 0 or 1
    outline: Array
    blood: float
    muscle: float
    tissue: float
    front: float  #: where the chest wall is, radians
    chest: float  #: how far away it is, mm
    lung: Blob
    neighbours: tuple[Blob, ...]
    gain: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Body:
        """Draw a patient with random lengths and intensities."""
        plane = float(rng.uniform(1.3, 1.8))
        fov = rng.uniform(165.0, 195.0, 2)
        h, w = (int(np.clip(round(side / plane / 2) * 2, 96, 128)) for side in fov)
        slices = int(rng.integers(6, 9))
        thickness = float(rng.uniform(8.0, 10.0))
        centre = tuple(float(v) for v in rng.normal(0.0, 7.0, 2))
        blood, muscle = float(rng.uniform(0.68, 0.9)), float(rng.uniform(0.26, 0.4))
        cavity, wall = float(rng.uniform(18.0, 24.0)), float(rng.uniform(6.5, 9.0))
        turn = float(np.pi + rng.normal(0.0, 0.6))
        beside = turn + np.pi + rng.normal(0.0, 0.5)  # the lung lies against the free wall of the LV
        lung = Blob(
            (centre[0] + 68.0 * np.sin(beside), centre[1] + 68.0 * np.cos(beside)),
            float(rng.uniform(36.0, 46.0)),
            _outline(rng, 0.1),
            float(rng.uniform(0.06, 0.12)),
            0.0,
            0.0,
        )
        return cls(
            shape=(slices, h, w),
            spacing=(thickness, plane, plane),
            origin=(float(rng.uniform(-120, -60)), float(rng.uniform(-120, -60)), float(rng.uniform(-50, 50))),
            centre=(centre[0], centre[1]),
            turn=turn,
            cavity=cavity,
            wall=wall,
            rv_size=float(rng.uniform(0.95, 1.2)),
            top=float(rng.random() < 0.4),
            outline=_outline(rng, 0.04),
            blood=blood,
            muscle=muscle,
            tissue=float(rng.uniform(0.3, 0.45)),
            front=float(turn + rng.normal(0.5, 0.4)),
            chest=float(rng.uniform(68.0, 85.0)),
            lung=lung,
            neighbours=_neighbours((centre[0], centre[1]), blood, muscle, rng),
            gain=float(rng.uniform(400.0, 1600.0)),
        )

    def render(self, contraction: float, rng: np.random.Generator) -> tuple[npt.NDArray[np.int16], IntArray]:
        """Image and dense mask (Z, H, W) with `contraction` 0 (relaxed) or 1 (contracted)."""
        grey, masks = zip(*(self._slice(z, contraction, rng) for z in range(self.shape[0])), strict=True)
        image = np.stack(grey)
        image *= np.exp(0.22 * _bias(self.shape, rng))
        image = np.hypot(image + rng.normal(0, 0.035, image.shape), rng.normal(0, 0.035, image.shape))  # Rician
        return np.clip(np.rint(image * self.gain), 0, 32767).astype(np.int16), np.stack(masks)

    def _slice(self, z: int, contraction: float, rng: np.random.Generator) -> tuple[Array, IntArray]:
        rows, columns = self._grid(rng)
        level = (z - self.top) / (self.shape[0] - 1 - self.top)  # 0 at the base, 1 at the apex, below 0 above the base
        grey = self._surroundings(rows, columns, level, rng)
        taper = float(np.sqrt(np.clip(1.0 - 0.92 * max(level, 0.0) ** 2, 0.0, 1.0)))
        squeeze = 1.0 - contraction * 0.33
        cavity = self.cavity * taper * squeeze
        wall = self.wall * (1.0 + 0.35 * contraction) * (0.8 + 0.2 * taper)
        outer = cavity + wall
        y, x = rows - self.centre[0], columns - self.centre[1]
        outline = self.outline + _outline(rng, 0.015)
        from_lv = _distance(y, x, outer, outline)
        # The right ventricle is a disc beside the left one, cut off by it; it ends before the apex.
        reach = outer * self.rv_size * (1.0 - 0.22 * contraction) * float(np.clip(1.35 - 1.15 * level, 0.0, 1.0))
        away = 0.92 * outer
        from_rv = _distance(y - away * np.sin(self.turn), x - away * np.cos(self.turn), max(reach, 0.01), outline[::-1])
        rv_there = level >= 0 and reach > 6.0
        lv_there = level >= 0 and cavity > 3.0
        soft = 0.5 * self.spacing[1]
        if level < 0:  # above the base: atria and vessels, bright and without a class
            grey = _blend(grey, from_rv + 4.0, self.blood, soft)
            grey = _blend(grey, from_lv + 0.35 * outer, self.blood, soft)
            return ndimage.gaussian_filter(grey, 0.55), np.zeros(grey.shape, np.int16)
        if rv_there:
            grey = _blend(grey, from_rv - 2.5, self.muscle, soft)  # thin wall, not annotated
            grey = _blend(grey, from_rv, self.blood * 0.97, soft)
        grey = _blend(grey, from_lv, self.muscle, soft)
        from_cavity = from_lv + wall
        mask = np.zeros(grey.shape, np.int16)
        if rv_there:
            mask[from_rv <= 0] = RV
        mask[from_lv <= 0] = MYO
        if lv_there:
            grey = _blend(grey, from_cavity, self.blood, soft)
            mask[from_cavity <= 0] = LV
            if level > 0.15:
                for angle in self.turn + np.array([2.2, 4.0]) + rng.normal(0, 0.2, 2):  # papillary muscles
                    at = cavity * 0.62
                    spot = np.hypot(y - at * np.sin(angle), x - at * np.cos(angle)) - cavity * 0.17
                    grey = _blend(grey, np.maximum(spot, from_cavity), self.muscle * 1.15, soft)
        return ndimage.gaussian_filter(grey, 0.55), mask

    def _grid(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Millimetres from the centre of the image, slightly distorted so that nothing is a perfect circle."""
        _, h, w = self.shape
        rows = np.broadcast_to((np.arange(h)[:, None] - (h - 1) / 2) * self.spacing[1], (h, w))
        columns = np.broadcast_to((np.arange(w)[None, :] - (w - 1) / 2) * self.spacing[2], (h, w))
        return rows + 0.9 * wobble((h, w), 28.0, rng), columns + 0.9 * wobble((h, w), 28.0, rng)

    def _surroundings(self, rows: Array, columns: Array, level: float, rng: np.random.Generator) -> Array:
        """Soft tissue, a lung, the chest wall on one side with air beyond it, and the neighbours."""
        soft = 0.6 * self.spacing[1]
        texture = 0.05 * _grain(rows.shape, 1.6, rng) + 0.04 * _grain(rows.shape, 6.0, rng)
        grey = self.tissue + texture
        y, x = rows - self.lung.centre[0], columns - self.lung.centre[1]
        lung = _distance(y, x, self.lung.radius, self.lung.outline)
        grey = _blend(grey, lung, self.lung.grey + 0.3 * texture, soft)
        beyond = rows * np.sin(self.front) + columns * np.cos(self.front) - self.chest
        beyond = beyond + 0.002 * (rows * np.cos(self.front) - columns * np.sin(self.front)) ** 2  # ribs are round
        grey = _blend(grey, -beyond, 0.85 + texture, soft)  # fat under the skin
        grey = _blend(grey, 14.0 - beyond, 0.03, soft)  # air
        for blob in self.neighbours:
            drift = 4.0 * level
            away = _distance(rows - blob.centre[0] - drift, columns - blob.centre[1], blob.radius, blob.outline)
            if blob.wall:
                grey = _blend(grey, away - blob.wall, blob.wall_grey, soft)
            grey = _blend(grey, away, blob.grey + 0.5 * texture, soft)
        return grey


def _neighbours(centre: Point, blood: float, muscle: float, rng: np.random.Generator) -> tuple[Blob, ...]:
    """Four to six round structures around the heart, most as bright as blood with a wall as dark as muscle."""
    blobs = []
    count = int(rng.integers(4, 7))
    start = rng.uniform(0, 2 * np.pi)
    for index in range(count):
        angle = start + 2 * np.pi * (index + rng.uniform(-0.25, 0.25)) / count
        radius = float(rng.uniform(8.0, 16.0))
        away = float(rng.uniform(66.0, 84.0))
        lookalike = rng.random() < 0.7
        grey = blood * rng.uniform(0.92, 1.06) if lookalike else muscle * rng.uniform(0.9, 1.3)
        blobs.append(
            Blob(
                (centre[0] + away * np.sin(angle), centre[1] + away * np.cos(angle)),
                radius,
                _outline(rng, 0.07),
                float(grey),
                float(rng.uniform(3.0, 8.0)) if lookalike else 0.0,
                float(muscle * rng.uniform(0.9, 1.1)),
            )
        )
    return tuple(blobs)


def _outline(rng: np.random.Generator, size: float) -> Array:
    """Coefficients (2, 3) of cos and sin at 2, 3 and 4 turns: how far an outline departs from a circle."""
    return np.asarray(rng.normal(0.0, size, (2, 3)) / np.array([1.0, 1.5, 2.0]))


def _distance(y: Array, x: Array, radius: float, outline: Array) -> Array:
    """About how far each point lies outside a wobbly circle (negative: inside)."""
    angle = np.arctan2(y, x)[..., None] * np.array([2.0, 3.0, 4.0])
    bumps = np.cos(angle) @ outline[0] + np.sin(angle) @ outline[1]
    return np.asarray(np.hypot(y, x) - radius * (1.0 + bumps))


def _blend(grey: Array, distance: Array, value: float | Array, soft: float) -> Array:
    """Put `value` where `distance` is negative, with an edge about two `soft` wide: the partial volume effect."""
    share = np.clip(0.5 - distance / (2.0 * soft), 0.0, 1.0)
    return grey + share * (value - grey)


def _grain(shape: tuple[int, ...], size: float, rng: np.random.Generator) -> Array:
    """Texture of unit variance whose grains are about `size` pixels."""
    grain = ndimage.gaussian_filter(rng.normal(size=shape), size, mode="wrap")
    return np.asarray(grain / grain.std())


def _bias(shape: tuple[int, int, int], rng: np.random.Generator) -> Array:
    """The coil's sensitivity: one smooth field for the volume, a little different from slice to slice."""
    common = wobble(shape[1:], 1.6 * max(shape), rng)
    return np.asarray(common[None] + 0.25 * rng.normal(0, 1, (shape[0], 1, 1)))


LABELS = Labels(("background", "RV", "Myo", "LV"), 4)
#: Habits of its default strokes and anatomy; `pclmix check` finds the same.
HABITS = {"background": ["ring"], "RV": ["pieces"], "Myo": ["midline", "pieces"], "LV": ["convex", "pieces"]}
FRAMES = ("frame01", "frame02")  #: the full heart (end of diastole) and the contracted one (end of systole)


def make_phantom(
    out: Path,
    cases: int,
    seed: int = 0,
    *,
    style: Style | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Write a complete dataset of `cases` patients, two frames each, and return the names of its cases.

    Names are `phantomXXX_frame01` and `_frame02`. A patient depends on `seed` and its number alone, so a larger set
    begins with the smaller one. `progress` is called with the name of each case written.
    """
    if not 1 <= cases <= 999:
        raise PclmixError(f"cases is {cases}; ask for 1 to 999 patients")
    style = style or Style()
    names: list[str] = []
    with atomic_folder(Path(out)) as root:
        for folder in (IMAGES, SCRIBBLES, REFERENCE):
            (root / folder).mkdir()
        for number in range(1, cases + 1):
            patient = f"phantom{number:03d}"
            body = Body.draw(case_rng(seed, patient))
            for contraction, frame in enumerate(FRAMES):
                name = f"{patient}_{frame}"
                rng = case_rng(seed, name)
                image, mask = body.render(float(contraction), rng)
                scribble = simulate(mask, style, rng)
                geometry = _write_image(root / IMAGES / f"{name}_0000.nii.gz", image, body)
                write_labels(root / SCRIBBLES / f"{name}.nii.gz", LABELS.encode(scribble), geometry, LABELS.names)
                write_labels(root / REFERENCE / f"{name}.nii.gz", LABELS.encode(mask), geometry, LABELS.names)
                names.append(name)
                if progress:
                    progress(name)
        splits = default_splits(names)
        write_dataset_json(
            root,
            channels=("MRI",),
            labels=LABELS,
            ending=".nii.gz",
            cases=len(names),
            name="phantom",
            habits=HABITS if style.kind != "points" and style.amount >= 1 else {"LV": ["convex"]},
            description=f"made by pclmix phantom --cases {cases} --seed {seed}",
        )
        write_splits(root, splits)
    return names


def _write_image(path: Path, image: npt.NDArray[np.int16], body: Body) -> Geometry:
    """Write int16 NIfTI in millimetres with sform, qform and pixdim agreeing; returns its geometry."""
    affine = np.diag([-body.spacing[2], -body.spacing[1], body.spacing[0], 1.0])
    affine[:3, 3] = body.origin
    file = nib.Nifti1Image(image.transpose(2, 1, 0), affine)
    file.header.set_xyzt_units("mm")
    file.set_qform(affine, code=1)
    file.set_sform(affine, code=1)
    nib.save(file, path)
    return Geometry(body.shape, body.spacing, file.header.copy())

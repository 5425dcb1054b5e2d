"""A dataset on disk: nnU-Net v2 raw, with scribbles in labelsTr and dense masks in referenceTr; splits by patient."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.data.habits import Habits, parse_habits
from pclmix.errors import PclmixError, nearest
from pclmix.io.files import KeptFiles, atomic_path, read_json, write_json
from pclmix.io.volume import ENDINGS, Geometry, Volume, ending_of, read_image, read_labels
from pclmix.labels import IntArray, Labels

#: The patient of `patient001_frame12`, `case7_ED`, `P3-t02` or `p7_frame01_slice_3` is the part before the frame.
#: A bare number is a frame only after a number (`patient001_02`): the one in `BRATS_001` or `img_0001` is the patient.
PATIENT_PATTERN = (
    r"^(?P<patient>.+?)(?:[_-](?:frame|fr|time|phase|slice|slc|t|z)[_-]?\d+|[_-](?:ED|ES)|(?<=\d)[_-]\d{1,2})*$"
)
_ACDC = re.compile(r"^patient(\d{3})(?:_frame\d+)?$")


@dataclass(frozen=True)
class Split:
    """One fold: cases to train on and cases to test on (nnU-Net calls the latter `val`)."""

    train: tuple[str, ...]
    test: tuple[str, ...]


def patient_of(case: str, pattern: str = PATIENT_PATTERN) -> str:
    """The patient a case belongs to; the case itself where the pattern does not match.

    >>> patient_of("patient001_frame12"), patient_of("scan_a"), patient_of("P3_ED")
    ('patient001', 'scan_a', 'P3')
    """
    match = re.match(pattern, case, re.IGNORECASE)
    return match.group("patient") if match and match.groupdict().get("patient") else case


def group_by_patient(cases: Sequence[str], pattern: str = PATIENT_PATTERN) -> dict[str, list[str]]:
    """Patients in sorted order, each with its cases in sorted order."""
    groups: dict[str, list[str]] = {}
    for case in sorted(cases):
        groups.setdefault(patient_of(case, pattern), []).append(case)
    return groups


def acdc_splits(cases: Sequence[str]) -> list[Split]:
    """ACDC's five folds of 20 consecutive patient numbers, (n - 1) // 20; folds without a case are left out."""
    folds: dict[int, list[str]] = {}
    for case in sorted(cases):
        match = _ACDC.match(case)
        if not match:
            raise PclmixError(f"case '{case}' is not named patientXXX_frameYY, so it has no ACDC fold")
        folds.setdefault((int(match.group(1)) - 1) // 20, []).append(case)
    return _from_folds([folds[k] for k in sorted(folds)])


def patient_splits(
    cases: Sequence[str], count: int, *, seed: int | None = None, pattern: str = PATIENT_PATTERN
) -> list[Split]:
    """`count` folds of whole patients: consecutive in sorted order, or shuffled by `seed`."""
    groups = list(group_by_patient(cases, pattern).values())
    if count < 1 or count > len(groups):
        raise PclmixError(f"cannot make {count} folds from {len(groups)} patients; ask for 1 to {len(groups)}")
    order = np.arange(len(groups)) if seed is None else np.random.default_rng(seed).permutation(len(groups))
    parts = np.array_split(order, count)
    return _from_folds([[case for g in sorted(part) for case in groups[g]] for part in parts])


def default_splits(cases: Sequence[str], pattern: str = PATIENT_PATTERN) -> list[Split]:
    """ACDC's folds where every case is named like ACDC's, else min(5, patients) folds."""
    if cases and all(_ACDC.match(case) for case in cases):
        return acdc_splits(cases)
    return patient_splits(cases, min(5, len(group_by_patient(cases, pattern))), pattern=pattern)


def make_splits(
    cases: Sequence[str],
    *,
    kind: str = "patient",
    count: int | None = None,
    seed: int | None = None,
    pattern: str = PATIENT_PATTERN,
) -> list[Split]:
    """Folds of the requested kind: `acdc` has its own number and order, `patient` takes `count` and `seed`."""
    if kind == "acdc":
        splits = acdc_splits(cases)
        if seed is not None or count not in (None, len(splits)):
            raise PclmixError(
                f"--kind acdc makes {len(splits)} folds in a fixed order here; leave --folds and --seed out"
            )
        return splits
    if kind != "patient":
        raise PclmixError(f"unknown kind of split '{kind}'.{nearest(kind, ('acdc', 'patient'))} Known: acdc, patient")
    patients = len(group_by_patient(cases, pattern))
    return patient_splits(cases, min(5, patients) if count is None else count, seed=seed, pattern=pattern)


def _from_folds(folds: list[list[str]]) -> list[Split]:
    everything = [case for fold in folds for case in fold]
    return [Split(tuple(sorted(set(everything) - set(fold))), tuple(sorted(fold))) for fold in folds]


def validation_cut(train: Sequence[str], share: float, seed: int, pattern: str = PATIENT_PATTERN) -> Split:
    """Cut validation patients off the training cases (never off the test fold): (train, validation)."""
    groups = list(group_by_patient(train, pattern).values())
    count = round(share * len(groups))
    if share <= 0:
        return Split(tuple(train), ())
    count = min(max(1, count), len(groups) - 1)
    if count < 1:
        raise PclmixError("a validation split needs at least two training patients; set data.validation=0")
    chosen = set(np.random.default_rng(seed).permutation(len(groups))[:count].tolist())
    kept = [case for g, group in enumerate(groups) if g not in chosen for case in group]
    held = [case for g, group in enumerate(groups) if g in chosen for case in group]
    return Split(tuple(kept), tuple(held))


_REQUIRED = ("channel_names", "labels", "file_ending", "numTraining")
_CHANNEL = re.compile(r"^(?P<case>.+)_\d{4}$")
IMAGES, SCRIBBLES, REFERENCE, SPLITS = "imagesTr", "labelsTr", "referenceTr", "splits_final.json"


@dataclass(frozen=True)
class Dataset:
    """dataset.json and the names of the cases; arrays are read when asked for.

    Only evaluation and the upper-bound method may call `read_reference`.
    """

    root: Path
    channels: tuple[str, ...]
    labels: Labels
    ending: str
    cases: tuple[str, ...]
    num_training: int
    patient_pattern: str = PATIENT_PATTERN
    name: str = ""
    habits: Habits = field(default_factory=dict)  #: class: how its strokes were drawn (see habits.py)
    not_annotated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  #: case: classes not annotated in it
    files: KeptFiles | None = field(default=None, compare=False, repr=False)  #: file contents kept in memory

    @classmethod
    def open(cls, root: Path) -> Dataset:
        """Read dataset.json and list the cases; nothing is verified beyond that (see `pclmix check`)."""
        root = Path(root)
        try:
            there = root.exists()
        except OSError as error:  # a name of thousands of letters
            raise PclmixError(f"{str(root)[:200]} cannot be opened: {error.strerror}") from error
        if not there:
            raise PclmixError(f"{root} does not exist; make a dataset with `pclmix import` or `pclmix phantom`")
        if not root.is_dir():
            raise PclmixError(f"{root} is a file; a dataset is a folder with dataset.json in it")
        where = root / "dataset.json"
        if not where.is_file():
            raise PclmixError(
                f"{where} does not exist, so {root} is not a dataset; "
                "`pclmix import folder` makes one from images and scribbles"
            )
        content = read_json(where)
        if not isinstance(content, dict):
            raise PclmixError(f"{where}: a JSON object is needed")
        for key in _REQUIRED:
            if key not in content:
                close = nearest(key, set(content) - set(_REQUIRED)).replace("Did you mean", "Is it misspelt as")
                raise PclmixError(f"{where}: the key '{key}' is missing.{close}")
        ending = content["file_ending"]
        if ending not in ENDINGS:
            raise PclmixError(f"{where}: file_ending {ending!r} is not known; use one of {', '.join(ENDINGS)}")
        names = content["channel_names"]
        if (
            not isinstance(names, dict)
            or sorted(names, key=str) != sorted((str(i) for i in range(len(names))), key=str)
            or not names
        ):
            raise PclmixError(f'{where}: channel_names must be a table such as {{"0": "MRI"}} with keys 0, 1, ...')
        if not isinstance(content["numTraining"], int) or isinstance(content["numTraining"], bool):
            raise PclmixError(f"{where}: numTraining must be a whole number")
        channels = tuple(str(names[str(i)]) for i in range(len(names)))
        labels = Labels.from_json(content["labels"], str(where))
        pattern = str(content.get("patient_pattern", PATIENT_PATTERN))
        try:
            groups = re.compile(pattern).groupindex
        except (re.error, RecursionError, OverflowError) as error:
            raise PclmixError(
                f"{where}: patient_pattern {pattern[:100]!r} is not a regular expression: {error}"
            ) from error
        if "patient" not in groups:  # every case would be a separate patient, and folds would share patients
            raise PclmixError(
                f"{where}: patient_pattern {pattern!r} has no group 'patient'; write it as in '(?P<patient>[^_]+)_'"
            )
        cases = _cases(root, ending)
        return cls(
            root,
            channels,
            labels,
            ending,
            cases,
            content["numTraining"],
            pattern,
            str(content.get("name", root.name)),
            parse_habits(content.get("habits", {}), labels, f"{where}: habits"),
            _not_annotated(content.get("not_annotated", {}), labels, cases, f"{where}: not_annotated"),
        )

    def annotated(self, case: str) -> npt.NDArray[np.bool_]:
        """(K,) whether each class was annotated in this case: if not, its absence has no meaning."""
        return np.array([name not in self.not_annotated.get(case, ()) for name in self.labels.names])

    def image_paths(self, case: str) -> list[Path]:
        """One file per channel, or one RGB file."""
        first = self.root / IMAGES / f"{case}_0000{self.ending}"
        rest = [self.root / IMAGES / f"{case}_{c:04d}{self.ending}" for c in range(1, len(self.channels))]
        if len(rest) == 2 and not any(p.exists() for p in rest) and self.ending in (".png", ".bmp", ".tif", ".tiff"):
            return [first]
        return [first, *rest]

    @property
    def is_colour(self) -> bool:
        """Whether images are colour pictures: their three channels are in one file."""
        return len(self.channels) == 3 and bool(self.cases) and len(self.image_paths(self.cases[0])) == 1

    def scribble_path(self, case: str) -> Path:
        return self.root / SCRIBBLES / f"{case}{self.ending}"

    def reference_path(self, case: str) -> Path:
        return self.root / REFERENCE / f"{case}{self.ending}"

    def has_reference(self, case: str) -> bool:
        return self.reference_path(case).is_file()

    def read_image(self, case: str) -> Volume:
        """All channels of a case, (C, Z, H, W)."""
        return read_channels(self.image_paths(case), len(self.channels), lambda path: read_image(path, self.kept(path)))

    def read_scribble(self, case: str) -> tuple[IntArray, Geometry]:
        """Classes and IGNORE, (Z, H, W)."""
        return self._decode(self.scribble_path(case))

    def read_reference(self, case: str) -> tuple[IntArray, Geometry]:
        """The dense mask, (Z, H, W). For evaluation and the upper-bound method only."""
        return self._decode(self.reference_path(case))

    def _decode(self, path: Path) -> tuple[IntArray, Geometry]:
        array, geometry = read_labels(path, self.kept(path))
        return self.labels.decode(array, str(path)), geometry

    def kept(self, path: Path) -> bytes | None:
        """The content of a file, if contents are kept."""
        return None if self.files is None else self.files.read(path)

    def splits(self) -> list[Split]:
        """The folds of splits_final.json, checked to be well formed and to name cases that exist.

        A dataset made for nnU-Net may come without the file: then the folds are those `default_splits` would write.
        """
        path = self.root / SPLITS
        if not path.exists():
            return default_splits(self.cases, self.patient_pattern) if self.cases else []
        content = read_json(path)
        if not isinstance(content, list) or not content or not all(_is_split(s) for s in content):
            raise PclmixError(
                f'{path}: a list of {{"train": [...], "val": [...]}} is needed; `pclmix split {self.root}` writes one'
            )
        known = set(self.cases)
        for k, entry in enumerate(content, start=1):
            unknown = [c for c in (*entry["train"], *entry["val"]) if c not in known]
            if unknown:
                raise PclmixError(
                    f"{path}: fold {k} names case '{unknown[0]}', which is not in {IMAGES}.{nearest(unknown[0], known)}"
                )
        return [Split(tuple(e["train"]), tuple(e["val"])) for e in content]

    def fold(self, number: int) -> Split:
        """Fold `number`, counted from 1."""
        splits = self.splits()
        if not 1 <= number <= len(splits):
            raise PclmixError(f"fold {number} does not exist: {self.root / SPLITS} has folds 1 to {len(splits)}")
        return splits[number - 1]


class ChannelError(PclmixError):
    """An image does not have the channels that dataset.json names; usually this affects all images."""


def read_channels(paths: Sequence[Path], count: int, read: Callable[[Path], Volume] = read_image) -> Volume:
    """Stack channel files into (C, Z, H, W); they must agree in grid and come to `count` channels."""
    volumes = [read(path) for path in paths]
    for path, volume in zip(paths[1:], volumes[1:], strict=True):
        difference = volumes[0].geometry.same_grid(volume.geometry)
        if difference:
            raise PclmixError(f"{paths[0]} and {path}: {difference}")
    array = np.concatenate([v.array for v in volumes]) if len(volumes) > 1 else volumes[0].array
    if array.shape[0] == 3 and count == 1 and bool((array == array[:1]).all()):
        array = array[:1]  # a grey picture saved as RGB
    if array.shape[0] != count:
        way_out = "; a colour picture has three: save it as grey" if (array.shape[0], count) == (3, 1) else ""
        if (array.shape[0], count) == (1, 3) and len(paths) == 1 and volumes[0].geometry.header is None:
            way_out = "; a grey picture has one: save it as RGB"
        raise ChannelError(
            f"{paths[0]}: {array.shape[0]} channel{'s' * (array.shape[0] > 1)} found, {count} needed{way_out}"
        )
    return Volume(array, volumes[0].geometry)


def write_dataset_json(
    root: Path, *, channels: Sequence[str], labels: Labels, ending: str, cases: int, **extra: Any
) -> None:
    """Write dataset.json as nnU-Net v2 reads it."""
    content = {
        "channel_names": {str(i): name for i, name in enumerate(channels)},
        "labels": labels.to_json(),
        "numTraining": cases,
        "file_ending": ending,
        **extra,
    }
    write_json(Path(root) / "dataset.json", content)


def write_splits(root: Path, splits: Sequence[Split]) -> None:
    write_json(Path(root) / SPLITS, [{"train": list(s.train), "val": list(s.test)} for s in splits])


def replace_splits(root: Path, splits: Sequence[Split]) -> None:
    """Write new folds; splits_previous.json keeps the old ones."""
    current = Path(root) / SPLITS
    if current.is_file():
        with atomic_path(current.with_name("splits_previous.json")) as temporary:
            temporary.write_bytes(current.read_bytes())
    write_splits(root, splits)


def _not_annotated(table: object, labels: Labels, cases: Sequence[str], where: str) -> Mapping[str, tuple[str, ...]]:
    """Case to classes, from a table such as {"case_07": ["vessel"]}."""
    if not isinstance(table, dict) or not all(isinstance(names, list) for names in table.values()):
        raise PclmixError(f'{where}: a table such as {{"CASE": ["CLASS"]}} is needed')
    known = set(cases)
    for case, names in table.items():
        if case not in known:
            raise PclmixError(f"{where}: there is no case '{case}'.{nearest(case, known)}")
        for name in names:
            labels.index(str(name), f"{where}.{case}")
    return {case: tuple(map(str, names)) for case, names in table.items() if names}


def _is_split(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(k), list) and all(isinstance(c, str) for c in entry[k]) for k in ("train", "val")
    )


def _cases(root: Path, ending: str) -> tuple[str, ...]:
    """Every name found in imagesTr or labelsTr, so that `check` can report which file is missing."""
    found = set()
    for path in (root / IMAGES).glob(f"[!.]*{ending}"):  # a name with a dot in front is hidden, not a case
        match = _CHANNEL.match(path.name[: -len(ending)])
        if ending_of(path) == ending and match:
            found.add(match.group("case"))
    for path in (root / SCRIBBLES).glob(f"[!.]*{ending}"):
        if ending_of(path) == ending:
            found.add(path.name[: -len(ending)])
    return tuple(sorted(found))

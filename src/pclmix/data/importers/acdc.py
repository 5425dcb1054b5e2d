"""ACDC as it is distributed: patientXXX/patientXXX_frameYY[_gt|_scribble].nii.gz, scribbles there or elsewhere."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from pclmix.data.importers.base import IMPORTERS, Options, Plan, Sources, copy_case, listed, need_folder
from pclmix.errors import PclmixError
from pclmix.io.volume import ending_of
from pclmix.labels import Labels

LABELS = Labels(("background", "RV", "Myo", "LV"), 4)
#: Habits of ACDC's expert scribbles (Valvano et al.): they hold in at least 98.8 % of the slices of patients 1 to 40.
HABITS = {"background": ["ring"], "RV": ["pieces"], "Myo": ["midline", "pieces"], "LV": ["convex", "pieces"]}
_FRAME = re.compile(r"^(?P<case>patient\d{3}_frame\d{2,3})(?:_(?P<kind>gt|scribble))?\.nii(?:\.gz)?$")


@IMPORTERS.register("acdc")
def plan(source: Path, options: Options) -> Plan:
    """Frames anywhere below `source`: 4D files, Info.cfg and wrapper folders (training, testing) are skipped."""
    options.only("acdc", "scribbles", "masks", "ignore", "skip_unmatched")
    found = find_frames(source)
    images = found["image"]
    if not images:
        raise PclmixError(f"{source} holds no patientXXX_frameYY.nii.gz; is it the ACDC tree?")
    scribbles = found["scribble"] if options.scribbles is None else _elsewhere(options.scribbles, "scribble")
    masks = found["gt"] if options.masks is None else _elsewhere(options.masks, "gt")
    if not scribbles:
        raise PclmixError(
            f"{options.scribbles or source} holds no scribbles (patientXXX_frameYY_scribble.nii.gz). If they are in "
            "another folder, give it with --scribbles. If there are only dense masks, draw scribbles with `pclmix "
            "scribble MASKS OUT` and add --scribbles OUT"
        )
    bare = sorted(set(images) - set(scribbles))
    # The official testing half has no published scribbles: it is left out, not an error.
    testing = [case for case in bare if "testing" in images[case].relative_to(source).parts]
    missing = [case for case in bare if case not in testing]
    skip = options.skip_unmatched
    if missing and not skip:
        raise PclmixError(
            f"no scribble for {listed(missing)}: {images[missing[0]]} has no {missing[0]}_scribble.nii.gz "
            f"in {options.scribbles or source}; add it, move the image away, or give --skip-unmatched"
        )
    lonely = sorted(set(scribbles) - set(images))
    if lonely and not skip:
        raise PclmixError(
            f"{len(lonely)} scribbles have no image in {source}, such as {scribbles[lonely[0]]}; "
            "add the images, move the scribbles away, or give --skip-unmatched"
        )
    cases = tuple(case for case in sorted(images) if case in scribbles)
    files = {case: Sources((images[case],), scribbles[case], masks.get(case)) for case in cases}
    notes = [f"{len(testing)} cases of the testing folder have no scribble and were left out"] if testing else []
    notes += [f"left out, without a scribble: {listed(missing)}"] if missing else []
    notes += [f"left out, without an image: {listed(lonely)}"] if lonely else []
    ending = ending_of(images[cases[0]])
    values = {k: k for k in range(LABELS.count)}
    ignore = 4 if options.ignore is None else options.ignore
    write = partial(_write, files, ending, {**values, ignore: 4}, values)
    return Plan(("MRI",), LABELS, ending, cases, write, tuple(notes), {"name": "ACDC", "habits": HABITS})


def _write(
    files: dict[str, Sources], ending: str, scribble: dict[int, int], mask: dict[int, int], case: str, folder: Path
) -> None:
    copy_case(case, files[case], folder, ending=ending, channels=1, scribble_values=scribble, mask_values=mask)


def find_frames(source: Path) -> dict[str, dict[str, Path]]:
    """Case to path, for the kinds image, gt and scribble; one case in two places is refused."""
    found: dict[str, dict[str, Path]] = {"image": {}, "gt": {}, "scribble": {}}
    for folder, _, names in os.walk(source, followlinks=True):
        for name in names:
            match = _FRAME.match(name)
            if not match:
                continue
            path, kind = Path(folder) / name, match.group("kind") or "image"
            other = found[kind].setdefault(match.group("case"), path)
            if other != path:
                raise PclmixError(f"{other} and {path} are the same frame twice; import one of the trees alone")
    return found


def _elsewhere(source: Path, kind: str) -> dict[str, Path]:
    """Labels in a separate tree, named with _scribble or _gt, or like the image."""
    need_folder(source)
    found = find_frames(source)
    return found[kind] or found["image"] or found["gt"]

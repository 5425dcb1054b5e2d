"""Which cases are trained on and which are tested: always by patient, fold K being entry K-1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pclmix.errors import PclmixError, nearest

#: The patient of `patient001_frame12`, `case7_ED`, `P3-t02` or `p7_frame01_slice_3` is what stands before the frame.
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
    """Folds of the kind asked for: `acdc` has its own number and order, `patient` takes `count` and `seed`."""
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

"""Folds are by patient, whole and disjoint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pclmix.data.dataset import acdc_splits, default_splits, group_by_patient, make_splits, patient_of, patient_splits
from pclmix.errors import PclmixError


@given(
    st.dictionaries(st.integers(1, 150), st.integers(1, 3), min_size=1, max_size=30),
    st.integers(1, 6),
    st.none() | st.integers(0, 9),
)
def test_every_patient_is_tested_once(frames, count, seed):
    cases = [f"patient{p:03d}_frame{f:02d}" for p, n in frames.items() for f in range(1, n + 1)]
    count = min(count, len(frames))
    for splits in (patient_splits(cases, count, seed=seed), acdc_splits(cases), default_splits(cases)):
        assert sorted(case for s in splits for case in s.test) == sorted(cases)
        for s in splits:
            assert s.test
            assert sorted((*s.train, *s.test)) == sorted(cases)
            assert not set(group_by_patient(s.train)) & set(group_by_patient(s.test))
    assert len(patient_splits(cases, count, seed=seed)) == count


def test_acdc_folds_are_twenty_patient_numbers_each():
    cases = [f"patient{p:03d}_frame{f:02d}" for p in range(1, 101) for f in (1, 9)]
    splits = default_splits(cases)
    assert [s.test[0] for s in splits] == [f"patient{p:03d}_frame01" for p in (1, 21, 41, 61, 81)]
    assert [(len(s.train), len(s.test)) for s in splits] == [(160, 40)] * 5
    some = default_splits([c for c in cases if not 21 <= int(c[7:10]) <= 60])
    assert [s.test[0] for s in some] == ["patient001_frame01", "patient061_frame01", "patient081_frame01"]


def test_default_number_of_folds():
    assert len(default_splits(["a1_01", "a1_02", "b_01", "c_01"])) == 3
    assert len(default_splits([f"scan{i}" for i in range(12)])) == 5


@pytest.mark.parametrize(
    ("case", "patient"),
    [
        ("patient001_frame12", "patient001"),
        ("patient001_frame12_slice_3", "patient001"),
        ("patient001_02", "patient001"),
        ("P3_ED", "P3"),
        ("P3-t02", "P3"),
        ("BRATS_001", "BRATS_001"),
        ("BraTS2021_00001", "BraTS2021_00001"),
        ("img_0001", "img_0001"),
        ("scan_a", "scan_a"),
    ],
)
def test_the_patient_of_a_case(case, patient):
    assert patient_of(case) == patient


def test_make_splits_refuses_invalid_requests():
    with pytest.raises(PclmixError, match="'random'"):
        make_splits(["a", "b"], kind="random")
    with pytest.raises(PclmixError, match=r"'a'.*ACDC"):
        make_splits(["a", "b"], kind="acdc")


def test_split_command_replaces_the_folds_and_keeps_the_old(dataset, run):
    before = (dataset / "splits_final.json").read_bytes()
    result = run("split", dataset, "--folds", 2, "--seed", 3)
    assert result.code == 0, result
    assert (dataset / "splits_previous.json").read_bytes() == before
    splits = json.loads((dataset / "splits_final.json").read_text())
    assert len(splits) == 2
    assert run("check", dataset).code == 0
    first = (dataset / "splits_final.json").read_bytes()
    assert run("split", dataset, "--folds", 2, "--seed", 3).code == 0
    assert (dataset / "splits_final.json").read_bytes() == first
    assert run("split", dataset, "--kind", "acdc").code == 0
    assert len(json.loads((dataset / "splits_final.json").read_text())) == 2

"""Strokes: labelsTr equals what was sent; conflicts are detected; earlier states can be restored."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.web.strokes import KEPT, StrokeStore, paint
from pclmix.web.workspace import Workspace


def labels_of(root: Path, case: str = "case1") -> np.ndarray:
    return np.asarray(nib.load(root / "labelsTr" / f"{case}.nii.gz").dataobj).transpose(2, 1, 0)


@given(
    st.lists(st.tuples(st.integers(0, 59), st.integers(1, 9), st.integers(-1, 2)), max_size=12),
)
def test_paint_writes_runs_in_order(runs):
    array = np.full((3, 4, 5), IGNORE, np.int16)
    slow = array.copy().ravel()
    inside = [run for run in runs if run[0] + run[1] <= 60]
    for start, length, value in inside:
        for i in range(start, start + length):
            slow[i] = value
    paint(array, inside, 3)
    assert np.array_equal(array.ravel(), slow)


@pytest.mark.parametrize("run", [(-1, 2, 0), (59, 2, 0), (0, 0, 0), (0, 1, 3), (0, 1, -2), (2**62, 2**62, 1)])
def test_paint_refuses_runs_outside_the_map(run):
    array = np.zeros((3, 4, 5), np.int16)
    with pytest.raises(PclmixError):
        paint(array, [run], 3)
    assert not array.any()


def test_saved_strokes_equal_the_file(page):
    first = page.client.get("/api/cases/case1/strokes")
    assert first.headers["x-shape"] == "4,12,10"
    before = np.frombuffer(first.content, np.uint8).reshape(4, 12, 10)
    old = labels_of(page.root)
    assert np.array_equal(np.where(before == 0, 3, before.astype(int) - 1), old)
    header = nib.load(page.root / "labelsTr" / "case1.nii.gz").header.copy()
    runs = [[120 + 5, 4, 2], [120 + 23, 1, -1], [0, 2, 0]]
    answer = page.client.post(
        "/api/cases/case1/strokes", json={"version": first.headers["x-version"], "runs": runs}
    ).json()
    expected = old.copy().ravel()
    expected[125:129], expected[143], expected[0:2] = 2, 3, 0
    assert np.array_equal(labels_of(page.root).ravel(), expected)
    after = nib.load(page.root / "labelsTr" / "case1.nii.gz").header
    for key in ("pixdim", "srow_x", "srow_y", "srow_z", "sform_code", "qform_code", "dim"):
        assert np.array_equal(header[key], after[key]), key
    assert page.client.get("/api/cases/case1/strokes").headers["x-version"] == answer["version"]
    assert page.client.get("/api/progress").json()["case1"]["voxels"][2] == 4


def test_conflict_with_a_second_tab(page):
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    mine = page.client.post("/api/cases/case1/strokes", json={"version": version, "runs": [[0, 3, 1]]})
    theirs = page.client.post("/api/cases/case1/strokes", json={"version": version, "runs": [[0, 3, 2]]})
    assert mine.status_code == 200
    assert theirs.status_code == 409
    assert theirs.json()["version"] == mine.json()["version"]
    assert labels_of(page.root).ravel()[:3].tolist() == [1, 1, 1]


def test_conflict_with_another_program(page):
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    path = page.root / "labelsTr" / "case1.nii.gz"
    image = nib.load(path)
    data = np.asarray(image.dataobj).copy()
    data[0, 0, 0] = 2
    nib.save(nib.Nifti1Image(data, None, image.header), path)
    answer = page.client.post("/api/cases/case1/strokes", json={"version": version, "runs": [[5, 1, 1]]})
    assert answer.status_code == 409
    assert labels_of(page.root)[0, 0, 0] == 2


def test_history_restores_both_ways(page):
    original = labels_of(page.root)
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    states = [original]
    for k in range(3):
        body = {"version": version, "runs": [[k * 10, 5, k]], "what": "strokes"}
        version = page.client.post("/api/cases/case1/strokes", json=body).json()["version"]
        states.append(labels_of(page.root))
    history = page.client.get("/api/cases/case1/history").json()
    assert [e["what"] for e in history] == ["strokes"] * 3
    for entry, state in zip(reversed(history), states[:3], strict=True):
        answer = page.client.post("/api/cases/case1/history", json={"version": version, "id": entry["id"]})
        version = answer.json()["version"]
        assert np.array_equal(labels_of(page.root), state)
    newest = page.client.get("/api/cases/case1/history").json()
    restored = next(e for e in newest if e["what"] == "restored" and e["id"].startswith("000004"))
    page.client.post("/api/cases/case1/history", json={"version": version, "id": restored["id"]})
    assert np.array_equal(labels_of(page.root), states[3])
    for bad in ("../../dataset", "000099-1-strokes", "x"):
        answer = page.client.post("/api/cases/case1/history", json={"version": version, "id": bad})
        assert answer.status_code in (404, 409)


def test_history_is_bounded(dataset):
    book = StrokeStore(Workspace(dataset))
    version = book.read("case1").version
    for k in range(KEPT + 5):
        version = book.save("case1", version, [(k % 100, 1, k % 3)])
    assert len(book.history("case1")) == KEPT


def test_image_without_labels(dataset, serve):
    (dataset / "labelsTr" / "case2.nii.gz").unlink()
    page = serve(dataset)
    first = page.client.get("/api/cases/case2/strokes")
    assert first.headers["x-version"] == "none"
    assert not any(first.content)
    page.client.post("/api/cases/case2/strokes", json={"version": "none", "runs": [[7, 1, 1]]})
    assert np.argwhere(labels_of(dataset, "case2") == 1).tolist() == [[0, 0, 7]]
    assert np.allclose(
        nib.load(dataset / "labelsTr" / "case2.nii.gz").affine,
        nib.load(dataset / "imagesTr" / "case2_0000.nii.gz").affine,
    )


@settings(max_examples=25)
@given(st.text(max_size=20), st.lists(st.tuples(st.integers(), st.integers(), st.integers()), max_size=3))
def test_invalid_saves_change_nothing(version, runs):
    array = np.full((2, 2, 2), IGNORE, np.int16)
    if all(s >= 0 and n >= 1 and s + n <= 8 and -1 <= k < 3 for s, n, k in runs):
        return
    with pytest.raises((PclmixError, OverflowError)):
        paint(array, runs, 3)
    assert (array == IGNORE).all()

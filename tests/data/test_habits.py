"""Stroke habits: parsed, tested against strokes and masks, suggested if the data support them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull, QhullError

from pclmix.config import load_config
from pclmix.data.check import check
from pclmix.data.dataset import Dataset
from pclmix.data.habits import (
    HABITS,
    Tally,
    classes_with,
    enclosed_class,
    habit_holds,
    hull_mask,
    override_habits,
    parse_habits,
)
from pclmix.errors import PclmixError
from pclmix.labels import IGNORE, Labels
from pclmix.synth import phantom
from pclmix.training.plan import with_habits

LABELS = Labels(("background", "wall", "core"), 3)
Y, X = np.mgrid[:80, :80]
AWAY = np.hypot(Y - 40, X - 40)


def slice_of(*, ring: bool = True, middle: float = 0.5, oval: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Strokes and mask of a wall from radius 12 to 20 around a core; `middle` is where in the wall its stroke lies."""
    mask = np.where(AWAY < 12, 2, np.where(AWAY < 20, 1, 0))
    if not oval:  # a core with a bite: not convex
        mask[(mask == 2) & (Y > 40) & (abs(X - 40) < 5)] = 1
    strokes = np.full(mask.shape, IGNORE)
    strokes[abs(AWAY - (12 + 8 * middle)) < 0.6] = 1
    strokes[(abs(AWAY - 6) < 0.6) & (mask == 2)] = 2
    background = abs(AWAY - 28) < 0.6 if ring else (Y == 5) & (X < 30)
    strokes[background] = 0
    return strokes, mask


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize(
    ("habit", "k", "good", "bad"),
    [
        ("ring", 0, {}, {"ring": False}),
        ("convex", 2, {}, {"oval": False}),
        ("midline", 1, {}, {"middle": 0.9}),
    ],
)
def test_habits_hold_or_fail(habit: str, k: int, good: dict[str, Any], bad: dict[str, Any], with_mask: bool) -> None:
    strokes, mask = slice_of(**good)
    assert habit_holds(habit, k, strokes, mask if with_mask else None, 3) is True
    strokes, mask = slice_of(**bad)
    expected = not (with_mask or habit == "ring")  # strokes alone show no more
    assert habit_holds(habit, k, strokes, mask if with_mask else None, 3) is expected


def test_strokes_alone_refute_a_convex_class() -> None:
    strokes, _ = slice_of()
    strokes[40, 40] = 1
    assert habit_holds("convex", 2, strokes, None, 3) is False


def test_every_piece_needs_a_stroke() -> None:
    strokes, mask = slice_of()
    assert habit_holds("pieces", 2, strokes, mask, 3) is True
    mask[70:76, 70:76] = 2
    assert habit_holds("pieces", 2, strokes, mask, 3) is False
    strokes[72, 72] = 2
    assert habit_holds("pieces", 2, strokes, mask, 3) is True
    assert habit_holds("pieces", 2, strokes, None, 3) is None


def test_empty_slices_test_no_habit() -> None:
    nothing, mask = np.full((80, 80), IGNORE), np.zeros((80, 80), int)
    for habit in HABITS:
        for k in range(3):
            assert habit_holds(habit, k, nothing, None, 3) is None
            assert habit_holds(habit, k, nothing, mask, 3) is None


def test_the_enclosed_class_is_found() -> None:
    strokes, _ = slice_of()
    assert enclosed_class(strokes, 1, 3) == 2
    assert enclosed_class(strokes, 2, 3) is None


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 11)), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_hull_equals_qhull(points: list[tuple[int, int]]) -> None:
    drawn = np.zeros((16, 12), bool)
    drawn[tuple(np.array(points).T)] = True
    hull = hull_mask(drawn)
    assert hull[drawn].all()
    try:
        edges = ConvexHull(np.array(points, float)).equations
    except QhullError:  # on one line
        return
    grid = np.stack(np.mgrid[:16, :12], -1).reshape(-1, 2)
    inside = (grid @ edges[:, :2].T + edges[:, 2] <= 1e-6).all(axis=1).reshape(16, 12)
    np.testing.assert_array_equal(hull, inside)


@pytest.mark.parametrize("words", ["ring, midline", ["ring", "midline"], "ring midline"])
def test_habits_are_parsed(words: Any) -> None:
    assert parse_habits({"wall": words}, LABELS, "x") == {"wall": ("ring", "midline")}


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ([], "where"),
        ({"wal": "ring"}, "where.wal"),
        ({"core": "convx"}, "where.core"),
        ({"core": 3}, "where.core"),
        ({"core": ["convex", 1]}, "where.core"),
        ({"background": "convex"}, "where.background"),
        ({"background": "ring", "wall": "ring"}, "where"),
    ],
)
def test_invalid_habit_names_the_key(table: Any, key: str) -> None:
    with pytest.raises(PclmixError) as caught:
        parse_habits(table, LABELS, "where")
    assert str(caught.value).startswith(key)


def test_configured_habits_override_and_are_idempotent() -> None:
    stated = parse_habits({"background": "ring", "core": "convex"}, LABELS, "x")
    resolved = override_habits(stated, {"core": "none", "wall": ["midline"]}, LABELS)
    assert classes_with("ring", resolved, LABELS) == (0,)
    assert classes_with("convex", resolved, LABELS) == ()
    assert classes_with("midline", resolved, LABELS) == (1,)
    assert override_habits(stated, resolved, LABELS) == resolved
    with pytest.raises(PclmixError):
        override_habits(stated, {"wall": "ring"}, LABELS)


def test_habits_are_counted_and_suggested() -> None:
    tally = Tally()
    for case in range(3):
        both = [slice_of(middle=0.5 if case else 0.52) for _ in range(4)]
        strokes, masks = (np.stack(part) for part in zip(*both, strict=True))
        other = Tally()
        other.add_case(strokes, masks, 3, [(2, "midline")])
        tally.merge(other)
    found = {(h.name, h.habit): h for h in tally.report(LABELS, {"core": ("midline",)})}
    assert set(found) == {
        ("background", "ring"),
        ("wall", "midline"),
        ("wall", "pieces"),
        ("core", "convex"),
        ("core", "midline"),  # stated, though nothing lies inside it
        ("core", "pieces"),
    }
    assert found["wall", "midline"].masks == (12, 12)
    assert found["core", "midline"].best.tested == 0


def test_strokes_alone_suggest_nothing_but_a_ring() -> None:
    tally = Tally()
    strokes, _ = slice_of()
    tally.add_case(np.stack([strokes] * 8), None, 3, [])
    tally.merge(tally)
    assert [(h.name, h.habit) for h in tally.report(LABELS, {})] == [("background", "ring")]


def test_check_warns_where_a_stated_habit_does_not_hold(phantom_dataset: Path, tmp_path: Path, run: Any) -> None:
    dataset = Dataset.open(phantom_dataset)
    assert dict(dataset.habits) == {name: tuple(words) for name, words in phantom.HABITS.items()}
    report = check(dataset)
    assert not [f for f in report.findings if f.kind == "habit"]
    assert report.suggested_habits == {}
    copied = tmp_path / "own"
    copied.mkdir()
    for entry in phantom_dataset.iterdir():
        if entry.name != "dataset.json":
            (copied / entry.name).symlink_to(entry)
    content = json.loads((phantom_dataset / "dataset.json").read_text())
    (copied / "dataset.json").write_text(json.dumps({**content, "habits": {"RV": "convex"}}))
    result = run("check", copied, "--json")
    assert result.code == 0
    said = json.loads(result.out)
    (finding,) = [f for f in said["findings"] if f["kind"] == "habit"]
    assert finding["level"] == "warning"
    assert "RV" in finding["message"]
    assert said["habits"][0]["strokes"]["tested"] > 0
    assert run("check", copied).code == 0
    (copied / "dataset.json").write_text(json.dumps({**content, "habits": {"RW": "convex"}}))
    result = run("check", copied)
    assert result.code == 2
    assert "habits.RW" in result.err


def test_a_run_takes_the_habits_of_its_dataset(phantom_dataset: Path) -> None:
    dataset = Dataset.open(phantom_dataset)
    config = with_habits(load_config("tiny", None, ["habits.LV=none"]), dataset)
    assert config.habits == {
        "background": ["ring"],
        "RV": ["pieces"],
        "Myo": ["midline", "pieces"],
        "LV": ["none"],
    }
    assert with_habits(config, dataset) == config
    with pytest.raises(PclmixError, match=r"habits\.LW"):
        with_habits(load_config("tiny", None, ["habits.LW=convex"]), dataset)


ACDC = Path(__file__).parents[2] / "../shared/acdc/raw"


@pytest.mark.skipif(not ACDC.is_dir(), reason="needs ../shared/acdc/raw, three patients of ACDC")
def test_acdc_states_habits_that_hold(tmp_path: Path) -> None:
    from pclmix.data.importers import import_dataset

    made, _ = import_dataset("acdc", ACDC, tmp_path / "acdc")
    report = check(made)
    stated = [h for h in report.habits if h.stated]
    assert len(stated) == sum(map(len, made.habits.values())) == 6
    assert all(h.best.tested > 20 for h in stated)
    assert all(h.best.share >= 0.95 for h in stated)

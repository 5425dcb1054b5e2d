"""Labels corrected by strokes: slices with known results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pclmix.data.habits import hull_mask
from pclmix.labels import IGNORE, Labels
from pclmix.training.straighten import Predicted, Rules, correct, cut_wall, decide, rules_of, straighten, straighten_all

LABELS = Labels(("background", "wall", "core", "other"), 4)
HABITS = {"background": ("ring",), "wall": ("midline", "pieces"), "core": ("convex", "pieces"), "other": ("pieces",)}
Y, X = np.mgrid[:80, :80]
AWAY = np.hypot(Y - 40, X - 40)
ALL = Rules(0, (1, 2, 3), ((2, 1),))


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image, strokes and truth: a bright core of radius 14 in a dark wall of radius 22; another structure beside it."""
    truth = np.where(AWAY < 14, 2, np.where(AWAY < 22, 1, 0))
    truth[30:50, 66:72] = 3
    strokes = np.full(truth.shape, IGNORE)
    strokes[abs(AWAY - 18) < 0.6] = 1
    strokes[abs(AWAY - 4) < 0.6] = 2
    strokes[36:44, 69] = 3
    strokes[abs(AWAY - 37) < 0.6] = 0
    image = np.choose(truth, [0.5, 0.2, 0.8, 0.7])[None]
    return image, strokes, truth


def test_rules_name_classes_by_number_and_walls_by_their_strokes() -> None:
    _, strokes, _ = drawn()
    assert rules_of(HABITS, LABELS, [strokes]) == ALL
    alone = np.where(strokes == 1, IGNORE, strokes)  # the wall is not drawn
    assert rules_of(HABITS, LABELS, [alone]).convex == ((2, None),)
    assert rules_of({"core": ("convex",)}, LABELS, [strokes]) == Rules(convex=((2, None),))
    assert rules_of({}, LABELS, [strokes]) == Rules()


def test_without_habits_only_strokes_are_enforced() -> None:
    image, strokes, _ = drawn()
    found = straighten(image, strokes, np.full(strokes.shape, 3), Rules())
    assert np.array_equal(found, np.where(strokes >= 0, strokes, 3))


def test_correct_labels_are_unchanged() -> None:
    image, strokes, truth = drawn()
    assert np.array_equal(straighten(image, strokes, truth, ALL), truth)


def test_slice_without_strokes_is_unchanged() -> None:
    image, strokes, truth = drawn()
    blank, network = np.full_like(strokes, IGNORE), np.where(X < 5, 3, truth)
    assert np.array_equal(straighten(image, blank, network, ALL), network)


def test_outside_the_ring_is_its_class() -> None:
    image, strokes, truth = drawn()
    network = truth.copy()
    network[:4, :4] = 1
    found = straighten(image, strokes, network, Rules(ring=0))
    assert np.array_equal(found, truth)
    assert found[40, 78] == 0


def test_components_without_a_stroke_take_the_nearest_label() -> None:
    image, strokes, truth = drawn()
    network = truth.copy()
    network[15:18, 55:58] = 3  # in the background
    network[39:42, 39:42] = 1  # in the core
    assert np.array_equal(straighten(image, strokes, network, Rules(pieces=(1, 3))), truth)
    kept = straighten(image, strokes, network, Rules(pieces=(1,)))
    assert (kept == 3).sum() == (truth == 3).sum() + 9


def test_class_without_a_stroke_is_removed_if_annotated() -> None:
    image, strokes, truth = drawn()
    strokes = np.where(strokes == 3, IGNORE, strokes)
    assert not (straighten(image, strokes, truth, ALL) == 3).any()
    assert np.array_equal(straighten(image, strokes, truth, ALL, annotated=(0, 1, 2)), truth)


def test_a_dark_spot_and_a_lost_rim_are_in_the_convex_core() -> None:
    image, strokes, truth = drawn()
    muscle = np.hypot(Y - 31, X - 40) < 2.5  # as dark as the wall, inside the core
    image[0][muscle] = 0.2
    network = np.where(muscle | ((AWAY >= 11) & (AWAY < 14)), 1, truth)
    found = straighten(image, strokes, network, ALL)
    assert np.array_equal(found, truth)
    plain = straighten(image, strokes, network, Rules(convex=((2, None),)))  # no wall: the hull alone, over background
    assert np.array_equal(plain, network)


def test_a_dark_cavity_in_a_bright_wall_is_found_alike() -> None:
    image, strokes, truth = drawn()
    network = np.where((AWAY >= 11) & (AWAY < 14), 1, truth)
    assert np.array_equal(straighten(1 - image, strokes, network, ALL), truth)


def test_intensity_comparison_uses_all_channels() -> None:
    image, strokes, truth = drawn()
    network = np.where((AWAY >= 11) & (AWAY < 14), 1, truth)
    two = np.concatenate([np.full_like(image, 0.3), image])
    assert np.array_equal(straighten(two, strokes, network, ALL), truth)
    flat = np.full_like(image, 0.3)  # no contrast: nothing is gained, nothing lost
    assert np.array_equal(straighten(flat, strokes, network, ALL), network)


def test_plain_convex_fills_dents_but_takes_no_other_structure() -> None:
    image, strokes, _ = drawn()
    network = np.where(AWAY < 14, 2, 0)
    network[(Y > 40) & (abs(X - 40) < 3)] = 0
    network[50:53, 39:42] = 3
    found = straighten(image, np.where(strokes == 2, 2, IGNORE), network, Rules(convex=((2, None),)))
    core = (network == 2) | (strokes == 2)
    assert np.array_equal(found == 2, hull_mask(core) & (network != 3))
    assert np.array_equal(found == 3, network == 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([ALL, Rules(0, (1, 2), ((2, None), (3, None))), Rules()]))
def test_strokes_take_precedence(seed: int, rules: Rules) -> None:
    image, strokes, _ = drawn()
    network = np.random.default_rng(seed).integers(0, 4, (8, 8)).repeat(10, 0).repeat(10, 1)
    found = straighten(image, strokes, network, rules)
    assert np.array_equal(found[strokes >= 0], strokes[strokes >= 0])
    assert found.dtype == network.dtype


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_straightening_a_convex_structure_is_idempotent(seed: int) -> None:
    image, strokes, _ = drawn()
    rules = Rules(convex=((2, None),))
    network = np.random.default_rng(seed).integers(0, 4, (8, 8)).repeat(10, 0).repeat(10, 1)
    once = straighten(image, strokes, network, rules)
    assert np.array_equal(straighten(image, strokes, once, rules), once)


@pytest.mark.parametrize("radius", [5, 9, 12])
def test_straightening_a_core_in_its_wall_is_idempotent(radius: int) -> None:
    image, strokes, truth = drawn()
    once = straighten(image, strokes, np.where((truth == 2) & (radius <= AWAY), 1, truth), ALL)
    assert np.array_equal(once, truth)
    assert np.array_equal(straighten(image, strokes, once, ALL), once)


def probabilities(labels: np.ndarray, unsure: np.ndarray, second: int, share: float = 0.6) -> np.ndarray:
    """(K, H, W) uint8: certain of `labels`, but with only `share` where `unsure`, and the rest on class `second`."""
    p = (np.arange(4)[:, None, None] == labels).astype(float)
    p[:, unsure] *= share
    p[second][unsure] += 1 - share
    return np.round(255 * p).astype(np.uint8)


def test_undecided_pixels_take_the_class_of_their_intensity() -> None:
    image, strokes, truth = drawn()
    too_large = np.where((truth == 1) & (AWAY < 16), 2, truth)  # two rings of the wall predicted as core
    p = probabilities(too_large, too_large != truth, second=1)
    assert np.array_equal(decide(image, strokes, p, 0.5), truth)
    assert np.array_equal(decide(np.repeat(image, 3, axis=0), strokes, p, 0.5), truth)  # channels count as one
    assert np.array_equal(decide(np.full_like(image, 0.5), strokes, p, 0.5), too_large)  # intensity says nothing
    confident = probabilities(too_large, too_large != truth, second=1, share=0.85)
    assert np.array_equal(decide(image, strokes, confident, 0.5), too_large)
    assert np.array_equal(decide(image, np.full_like(strokes, IGNORE), p, 0.5), too_large)


def test_intensity_decides_for_no_class_that_is_absent() -> None:
    image, strokes, truth = drawn()
    without = np.where(truth == 3, 0, truth)  # neither predicted nor drawn, but bright as the undecided pixels
    p = probabilities(without, truth == 3, second=3)
    assert not (decide(image, np.where(strokes == 3, IGNORE, strokes), p, 5.0) == 3).any()


def test_an_undecided_wall_ends_at_twice_the_distance_of_its_stroke() -> None:
    _, strokes, truth = drawn()
    thick = np.where((AWAY >= 22) & (AWAY < 27), 1, truth)  # the stroke, at 18, is the middle of 14 to 22
    unsure = probabilities(thick, (thick == 1) & (AWAY > 19), second=0)
    cut = cut_wall(thick, strokes, unsure, 2, 1)
    assert not (cut[AWAY > 24] == 1).any()
    assert (cut[(AWAY >= 14) & (AWAY < 21)] == 1).all()
    assert np.array_equal(cut[truth == 2], truth[truth == 2])
    sure = probabilities(thick, np.zeros(thick.shape, bool), second=0)
    assert np.array_equal(cut_wall(thick, strokes, sure, 2, 1), thick)
    assert np.array_equal(cut_wall(truth, strokes, probabilities(truth, truth == 1, second=0), 2, 1), truth)
    assert np.array_equal(cut_wall(thick, np.full_like(strokes, IGNORE), unsure, 2, 1), thick)


def test_threads_do_not_change_the_result() -> None:
    image, strokes, truth = drawn()
    networks = [np.where(r > AWAY, 2, truth) for r in range(3, 20)] * 10  # more than wait at a time
    slices = [Predicted(image, strokes, probabilities(labels, AWAY > 15, second=1)) for labels in networks]
    found = straighten_all(iter(slices), ALL, 0.5, True)
    assert np.array_equal(found, np.stack([correct(one, ALL, 0.5, True) for one in slices]))
    plain = straighten_all(iter(slices[:3]), ALL)
    assert np.array_equal(plain, np.stack([straighten(image, strokes, labels, ALL) for labels in networks[:3]]))

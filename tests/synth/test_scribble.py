"""Simulated strokes stay in their class, cover each class, and follow kind, amount, width and seed."""

from __future__ import annotations

import importlib
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage
from skimage.morphology import skeletonize

from pclmix.errors import PclmixError
from pclmix.labels import IGNORE
from pclmix.synth import strokes
from pclmix.synth.scribble import KINDS, Style, case_rng, simulate


def heart(size: int = 128) -> np.ndarray:
    """One slice (1, H, W): a pool, a ring around it, a crescent beside it."""
    y, x = np.mgrid[:size, :size] - size / 2
    radius, beside = np.hypot(y, x), np.hypot(y, x + 0.2 * size)
    mask = np.zeros((size, size), np.int16)
    mask[beside < 0.2 * size] = 1
    mask[radius < 0.21 * size] = 2
    mask[radius < 0.14 * size] = 3
    return mask[None]


def islands(seed: int) -> np.ndarray:
    """Three slices of blobs of five classes, some slices without some class."""
    noise = np.random.default_rng(seed).normal(size=(3, 40, 52))
    return (np.clip(ndimage.gaussian_filter(noise, (0, 3, 3)) * 25, -1, 4) + 0.999).astype(np.int16).clip(0)


@settings(max_examples=40, deadline=None)
@given(
    masks=st.one_of(
        st.integers(0, 1000).map(islands),
        hnp.arrays(np.int16, hnp.array_shapes(min_dims=3, max_dims=3, max_side=9), elements=st.integers(-1, 3)),
    ),
    kind=st.sampled_from(KINDS),
    amount=st.sampled_from([0.05, 0.5, 1.0, 3.0]),
    width=st.integers(1, 4),
    border=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
@example(islands(167), "brush", 0.05, 2, 1.0, 0)  # the core of an island has two parts
def test_every_stroke_is_inside_its_class_and_each_class_has_one(
    masks: np.ndarray, kind: str, amount: float, width: int, border: float, seed: int
) -> None:
    out = simulate(masks, Style(kind, amount, width, border), np.random.default_rng(seed))
    assert out.shape == masks.shape
    assert ((out == masks) | (out == IGNORE)).all()
    for mask, drawn in zip(masks, out, strict=True):
        assert set(np.unique(drawn)) - {IGNORE} == set(np.unique(mask)) - {IGNORE}


def test_one_pixel_wide_unless_asked() -> None:
    for seed in range(10):
        thin = simulate(heart(), Style(), np.random.default_rng(seed))[0]
        ring = thin == 2
        assert not ndimage.binary_erosion(ring, np.ones((3, 3))).any()
        assert ring.sum() > 40
    wide = simulate(heart(), Style(width=5), np.random.default_rng(3))
    assert (wide >= 0).sum() > 1.5 * (simulate(heart(), Style(), np.random.default_rng(3)) >= 0).sum()


def test_brush_width_follows_the_image_size() -> None:
    """Four pixels of 256, whatever the stroke; --width says otherwise."""
    for size, expected in ((128, 2), (256, 4), (384, 6)):
        drawn = simulate(heart(size), Style("brush"), np.random.default_rng(0))[0]
        line = skeletonize(drawn == 0)
        assert expected <= (drawn == 0).sum() / line.sum() < 1.4 * expected + 1
    exact = simulate(heart(256), Style("brush", width=9), np.random.default_rng(0))[0]
    assert (exact == 0).sum() > 1.5 * (simulate(heart(256), Style("brush"), np.random.default_rng(0))[0] == 0).sum()


def test_border_strokes_follow_the_outlines_beside_the_interior_ones() -> None:
    mask = heart(256)
    near = {}
    for share in (0.0, 0.3, 0.9):
        drawn = simulate(mask, Style(border=share), np.random.default_rng(0))[0]
        counts = []
        for k in range(4):
            inside = ndimage.distance_transform_edt(mask[0] == k)
            outline = (inside > 0) & (inside <= 3.5)
            counts.append((outline & (drawn == k)).sum() / (inside == 1).sum())
        near[share] = np.array(counts)
        assert all((drawn == k).sum() > 30 for k in range(4))
    # The crescent is so thin that its interior stroke is near its outline, too.
    assert (near[0.3] > near[0.0] + 0.1).all()
    assert (near[0.3] < 0.6).all()
    assert (near[0.9] > near[0.3]).all()


MEDSCRIBBLE = Path(__file__).parents[2] / "../shared/sets/medscribble.tar"


@pytest.mark.slow
@pytest.mark.skipif(not MEDSCRIBBLE.is_file(), reason="needs ../shared/sets/medscribble.tar")
def test_brush_statistics_match_medscribble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians over twelve tasks, within a factor of 1.6 of three people's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("strokes")
    with tarfile.open(MEDSCRIBBLE) as archive:
        archive.extractall(tmp_path, filter="data")
    tasks = sorted({p.parent for p in tmp_path.rglob("scribbles_0")})
    rows = [row for task in tasks for row in benchmark.compare(task, 1)]
    for row in benchmark.medians(rows):
        for name in ("share", "length", "width", "place"):
            ratio = row["brush"][name] / row["people"][name]
            assert 1 / 1.6 < ratio < 1.6, (row["region"], name, ratio)


def test_ring_goes_around_and_nothing_lies_beyond_the_background_ring() -> None:
    for seed in range(10):
        mask = heart(160)
        drawn = simulate(mask, Style(), np.random.default_rng(seed))[0]
        angles = np.arctan2(*(np.argwhere(drawn == 2) - 80).T)
        assert len(np.unique(np.floor(angles * 8 / np.pi))) >= 9  # of 16 sectors
        away = ndimage.distance_transform_edt(mask[0] == 0)
        assert (away[drawn == 0] < 45).mean() > 0.6  # the ring; the rest is the stray arc
        assert not (drawn[away > 70] == 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_more_amount_draws_more(kind: str) -> None:
    counts = [
        sum((simulate(heart(), Style(kind, amount), np.random.default_rng(s)) >= 0).sum() for s in range(5))
        for amount in (0.3, 1.0, 3.0)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_points_are_points() -> None:
    drawn = simulate(heart(), Style("points"), np.random.default_rng(0))
    assert [(drawn == k).sum() for k in range(4)] == [5, 1, 1, 1]


def test_box_is_the_outline_of_the_foreground() -> None:
    drawn = simulate(heart(), Style("box"), np.random.default_rng(0))[0]
    rows, columns = np.nonzero(heart()[0])
    expected = np.zeros((128, 128), bool)
    expected[rows.min() - 1 : rows.max() + 2, columns.min() - 1 : columns.max() + 2] = True
    expected[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = False
    assert (expected & (drawn != 0)).sum() <= 4  # the corners may be cut
    assert not ((drawn == 0) & ~expected).any()


def test_seed_determines_strokes() -> None:
    first, again, other = (simulate(heart(), Style(), case_rng(seed, "a")) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, simulate(heart(), Style(), case_rng(1, "b")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "point"}, "'points'"),
        ({"amount": 0.0}, "amount"),
        ({"amount": 21.0}, "amount"),
        ({"width": 0}, "width"),
        ({"border": 1.5}, "border"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(PclmixError, match=message):
        Style(**options)  # type: ignore[arg-type]


def test_pixels_of_a_line_are_connected_and_thin() -> None:
    curve = np.array([[0.0, 0.0], [3.3, 10.2], [20.0, 12.0]])
    points = strokes.pixels(curve)
    steps = np.abs(np.diff(points, axis=0))
    assert steps.max() == 1
    assert len(points) == 21 or len(points) < 1.2 * strokes.length(curve)


def test_part_keeps_its_share() -> None:
    line = np.array([[0.0, 0.0], [0.0, 100.0]])
    loop = np.array([[0, 0], [0, 50], [50, 50], [50, 0], [0, 0]], float)
    for curve in (line, loop):
        piece = strokes.part(curve, 0.4, np.random.default_rng(0))
        assert strokes.length(piece) == pytest.approx(0.4 * strokes.length(curve), rel=0.03)

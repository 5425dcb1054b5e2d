"""The demo: one page that opens offline, scores in JSON, and nothing overwritten that is not its own."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from pclmix.errors import PclmixError
from pclmix.labels import IGNORE, Labels
from pclmix.report import demo as demo_module
from pclmix.report import panels
from pclmix.report.curves import curve, smooth
from pclmix.report.demo import clear, run_demo
from pclmix.report.page import verdict

LABELS = Labels(("background", "RV", "LV"), 3)


class Outline(HTMLParser):
    """Tags that are open, text, and every address the page refers to."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> demo_module.Demo:
    """A demo too short to learn anything, of three patients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCLMIX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(demo_module, "PATIENTS", 3)
        patch.setattr(demo_module, "RECIPE", "tiny")
        return run_demo(tmp_path_factory.mktemp("demo") / "out", seconds=1.0, seed=3)


def test_json_holds_both_scores_and_the_seconds(finished: demo_module.Demo) -> None:
    content = json.loads((finished.root / "demo.json").read_text())
    for method in ("pclmix", "pce"):
        assert 0 <= content[method]["Dice"] <= 1
        assert set(content[method]["classes"]) == {"RV", "Myo", "LV"}
        assert content[method]["seconds"] >= 1.0
        assert content[method]["steps"] >= 1
        evaluation = json.loads((finished.root / method / "evaluation.json").read_text())
        assert content[method]["Dice"] == evaluation["mean"]["Dice"]
    points = 100 * (content["pclmix"]["Dice"] - content["pce"]["Dice"])
    assert content["dice_points_ahead"] == pytest.approx(points)
    assert content["seconds"] == 1.0
    assert content["patients"] == {"training": 1, "held_out": 2}


def test_both_methods_share_scribbles_encoder_and_augmentation(finished: demo_module.Demo) -> None:
    import yaml

    ours, other = (yaml.safe_load((one.run / "config.yaml").read_text()) for one in finished.trained)
    assert {key for key in ours if ours[key] != other[key]} == {"method", "params"}


def test_page_is_one_file_and_says_by_how_much(finished: demo_module.Demo) -> None:
    text = (finished.root / "report.html").read_text(encoding="utf-8")
    page = Outline()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.seen
    assert page.addresses
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert not re.search(r"url\(|@import|https?://", text)
    shown = " ".join("".join(page.text).split())
    assert verdict(finished) in shown
    assert f"{abs(finished.points):.1f} Dice points" in verdict(finished)
    for word in ("image", "scribble", "its uncertainty", "truth", "HD95", "RV", "Myo", "LV"):
        assert word in shown
    assert page.seen.count("svg") == 6  # total, sup, ctr, het, mix; and pce
    assert page.seen.count("img") == 3 * 7  # best, middle, worst; image, scribble, two of each method, truth


def test_verdict_says_behind(finished: demo_module.Demo) -> None:
    import dataclasses

    ours, other = finished.trained
    turned = dataclasses.replace(finished, trained=(other, ours))
    assert turned.points == -finished.points
    words = {verdict(finished), verdict(turned)}
    assert sum("ahead of" in sentence for sentence in words) == (2 if finished.points == 0 else 1)


def test_a_demo_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    clear(out, overwrite=False)  # empty: nothing to lose
    (out / "report.html").write_text("old")
    (out / "dataset").mkdir()
    with pytest.raises(PclmixError, match="exists already"):
        clear(out, overwrite=False)
    clear(out, overwrite=True)
    assert list(out.iterdir()) == []
    (out / "thesis.doc").write_text("precious")
    with pytest.raises(PclmixError, match=r"thesis\.doc"):
        clear(out, overwrite=True)
    assert (out / "thesis.doc").read_text() == "precious"


def test_paint_leaves_what_is_not_annotated() -> None:
    labels = np.array([[IGNORE, 0], [1, 2]])
    painted = panels.paint(np.zeros((2 * panels.ZOOM, 2 * panels.ZOOM, 3)), labels, LABELS, 1.0)
    centre = panels.ZOOM // 2
    assert (painted[centre, centre] == 0).all()
    assert painted[centre, panels.ZOOM + centre] == pytest.approx(panels.rgb(panels.BACKGROUND_STROKE))
    assert painted[panels.ZOOM + centre, centre] == pytest.approx(panels.rgb(LABELS.colours()[1]))
    dense = panels.paint(np.zeros_like(painted), np.array([[0, 0], [1, 2]]), LABELS, 1.0)
    assert (dense[:2, :2] == 0).all()  # a dense mask's background is not painted


def test_outline_is_on_the_edge_alone() -> None:
    truth = np.zeros((5, 5), dtype=int)
    truth[1:4, 1:4] = 1
    drawn = panels.outline(np.zeros((5 * panels.ZOOM, 5 * panels.ZOOM, 3)), truth)[..., 0] > 0
    inside = panels.enlarge(truth) == 1
    assert not drawn[~inside].any()
    side = 3 * panels.ZOOM
    assert drawn.sum() == side**2 - (side - 2) ** 2


def test_curve_stays_in_its_frame() -> None:
    drawn = curve([1, 2, 3], [5.0, -100.0, 4.0], "a < b", 10)
    points = re.findall(r'points="([^"]*)"', drawn)
    ys = [float(pair.split(",")[1]) for series in points for pair in series.split()]
    assert all(0 <= y <= 150 for y in ys)
    assert curve([1], [2.0], "one", 1)  # a single point is no reason to fail


def test_smooth_by_hand() -> None:
    assert smooth([2.0, 4.0], weight=0.5) == pytest.approx([2.0, (0.25 * 2 + 0.5 * 4) / 0.75])

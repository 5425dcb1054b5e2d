"""The demo: one page that opens offline, scores in JSON, and no foreign file overwritten."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pclmix.errors import PclmixError
from pclmix.metrics.comparison import compare_pair
from pclmix.studies import demo as demo_module
from pclmix.studies.demo import clear, run_demo


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


def test_json_has_scores_steps_and_seconds(finished: demo_module.Demo) -> None:
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


def test_methods_differ_in_method_and_params_only(finished: demo_module.Demo) -> None:
    import yaml

    ours, other = (yaml.safe_load((one.run / "config.yaml").read_text()) for one in finished.trained)
    assert {key for key in ours if ours[key] != other[key]} == {"method", "params"}


def test_page_is_one_file_with_the_scores_of_the_evaluation(finished: demo_module.Demo) -> None:
    text = (finished.root / "report.html").read_text(encoding="utf-8")
    page = Outline()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.seen
    assert page.addresses
    assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    shown = " ".join("".join(page.text).split())
    for one in finished.trained:
        for name in one.summary.names:
            dice = one.summary.of_class(name, "Dice")
            assert f"{100 * dice.mean:.1f} ({100 * dice.sd:.1f})" in shown
    assert page.seen.count("svg") == 6  # total, sup, ctr, het, mix; and pce
    assert page.seen.count("img") == 3 * 7  # best, median, worst; image, scribble, two of each method, dense mask


def test_verdict_names_the_method_ahead(finished: demo_module.Demo) -> None:
    ours, other = finished.trained
    turned = dataclasses.replace(
        finished, trained=(other, ours), difference=compare_pair(other.summary, ours.summary, ours.name)
    )
    assert turned.points == pytest.approx(-finished.points)
    assert f"{abs(finished.points):.1f} Dice points" in finished.verdict
    if finished.points:
        assert {"ahead" in finished.verdict, "ahead" in turned.verdict} == {True, False}


def test_overwrite_replaces_demos_only(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    clear(out, overwrite=False)  # empty
    (out / "report.html").write_text("old")
    (out / "dataset").mkdir()
    with pytest.raises(PclmixError, match="demo"):
        clear(out, overwrite=False)
    clear(out, overwrite=True)
    assert list(out.iterdir()) == []
    (out / "thesis.doc").write_text("precious")
    with pytest.raises(PclmixError, match=r"thesis\.doc"):
        clear(out, overwrite=True)
    assert (out / "thesis.doc").read_text() == "precious"


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 0.0, 1e30])
def test_an_invalid_time_leaves_nothing(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(PclmixError, match=r"engine\.seconds"):
        run_demo(tmp_path / "demo", seconds=seconds)
    assert not list(tmp_path.iterdir())

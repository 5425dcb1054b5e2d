"""Accessibility: keyboard only, and axe-core (https://github.com/dequelabs/axe-core).

Skipped where Chromium, playwright or axe-playwright-python is not installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from browsing import labels_of, one_voxel, predict_by_hand, wait_saved

pytestmark = pytest.mark.xdist_group("browser")
SHAPE = (6, 80, 100)


@pytest.fixture
def predicted(tmp_path, serve) -> Any:
    """A dataset with a prediction, so that every part of the page is shown."""
    one_voxel(tmp_path / "set", np.diag([1.0, 1.0, 5, 1.0]), SHAPE, (3, 40, 50))
    labels, doubt = np.zeros(SHAPE), np.zeros(SHAPE)
    labels[2:5, 20:40, 20:50], doubt[2, 50:60, 50:70] = 1, 1
    predict_by_hand(tmp_path / "set", "case", labels, doubt)
    return serve(tmp_path / "set")


def focus(page: Any, selector: str, most: int = 120) -> None:
    """Move the focus to an element with Tab."""
    for _ in range(most):
        if page.evaluate("s => document.activeElement?.matches(s)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{selector} cannot be reached with the keyboard")


def test_keyboard_only_session(predicted, open_page):
    root = predicted.root
    page = open_page(predicted.url)
    page.wait_for_selector(".places button")
    before = labels_of(root, "case")
    focus(page, "#canvas")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("2")
    for key in ("Shift+ArrowLeft", "Shift+ArrowUp", "Enter", *["Shift+ArrowRight"] * 9, "Enter", "Shift+ArrowRight"):
        page.keyboard.press(key)
    wait_saved(page)
    drawn = np.argwhere(labels_of(root, "case") == 2)
    assert len(drawn) >= 9 * 3
    assert len(set(drawn[:, 0])) == 1
    assert np.ptp(drawn[:, 2]) >= 9
    assert np.ptp(drawn[:, 1]) <= 3
    page.keyboard.press("Control+z")
    wait_saved(page)
    assert np.array_equal(labels_of(root, "case"), before)
    page.keyboard.press("ArrowDown")
    assert page.locator("#corner").inner_text() == "Slice 5 of 6"
    page.keyboard.press("+")
    page.keyboard.press("f")
    page.keyboard.press("?")
    assert page.locator("#dialog").is_visible()
    page.keyboard.press("Escape")
    focus(page, "#classes button")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-checked')") == "true"
    assert page.locator("#classes [aria-checked=true]").inner_text().startswith("two")
    for key, number in (("Home", 1), ("End", 6), ("ArrowUp", 5)):
        focus(page, "#slices")
        page.keyboard.press(key)
        assert page.locator("#corner").inner_text() == f"Slice {number} of 6"
    focus(page, "#pen")
    page.keyboard.press("ArrowRight")
    assert page.locator("#pen-size").inner_text() == "4"
    assert page.locator("#corner").inner_text() == "Slice 5 of 6"  # the arrow was the slider's
    focus(page, "#train")
    focus(page, ".places button")
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    assert page.locator("#corner").inner_text() == "Slice 3 of 6"
    assert page.evaluate("document.activeElement.matches('.places button')")  # the list drawn anew keeps the focus
    focus(page, "#accept-slice")
    page.keyboard.press("Enter")
    wait_saved(page)
    assert (labels_of(root, "case")[2] == 1).sum() == 20 * 30
    focus(page, "#preset")
    focus(page, "#level")
    focus(page, "#reset-window")
    focus(page, "#history")
    page.keyboard.press("Enter")
    page.locator(".past button").first.wait_for()
    focus(page, ".past button:last-child")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog:not([open])", state="attached")
    assert np.array_equal(labels_of(root, "case"), before)


def test_the_list_of_cases_on_a_narrow_screen(predicted, open_page):
    page = open_page(predicted.url)
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("#show-cases").click()
    panel = page.locator("#cases-panel")
    page.wait_for_timeout(300)
    assert panel.bounding_box()["y"] >= page.locator("header").bounding_box()["height"] - 1
    focus(page, "#filter")
    page.keyboard.press("Escape")
    page.wait_for_timeout(300)
    assert not panel.is_visible()
    assert page.evaluate("document.activeElement.id") == "show-cases"
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    page.locator("#stage").click(position={"x": 350, "y": 300})
    page.wait_for_timeout(300)
    assert not panel.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_serious(predicted, open_page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install 'pclmix[dev]'")
    page = open_page(predicted.url)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_selector(".places button", state="attached")
    page.get_by_text("Settings").click()
    page.wait_for_timeout(400)

    def serious() -> list[str]:
        found = axe.Axe().run(page).response["violations"]
        bad = [v for v in found if v["impact"] in ("serious", "critical")]
        return [f"{v['id']}: {node['html'][:100]} {node['failureSummary'][:200]}" for v in bad for node in v["nodes"]]

    assert serious() == []
    for open_dialog in ("?", "h"):
        if open_dialog == "?":
            page.keyboard.press("?")
        else:
            page.locator("#history").click()
        page.wait_for_selector("#dialog[open]")
        page.wait_for_timeout(200)
        assert serious() == []
        page.keyboard.press("Escape")
    page.evaluate("import('./dialogs.js').then((d) => d.alarm({ message: 'the disk is full', status: 507 }, () => {}))")
    page.wait_for_selector("#alert:not([hidden])")
    assert serious() == []

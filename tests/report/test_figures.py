"""Figures: curves, and how they are put into pages."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from pclmix.report import figures, pages


def test_loss_curve_of_one_step_and_of_outliers() -> None:
    assert figures.loss_curve([1], [2.0], "one")
    figure = figures.loss_curve([1, 2, 3], [5.0, -100.0, 4.0], "a < b")
    low, high = figure.axes[0].get_ylim()
    calm = figures.smooth([5.0, -100.0, 4.0])
    assert low < min(calm) < max(calm) < high


def test_smooth_by_hand() -> None:
    assert figures.smooth([2.0, 4.0], weight=0.5) == pytest.approx([2.0, (0.25 * 2 + 0.5 * 4) / 0.75])


def test_svg_takes_the_colours_of_the_page() -> None:
    drawn = str(pages.svg(figures.loss_curve([1, 2, 3], [5.0, 3.0, 4.0], "a < b"), "a < b"))
    root = ElementTree.fromstring(drawn.replace("xlink:", ""))
    assert root.attrib["aria-label"] == "a < b"
    assert "var(--accent)" in drawn
    assert not any(colour in drawn for colour in pages.VARIABLES)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert all(f"#{name}" in drawn for name in ids)


def test_values_are_escaped() -> None:
    class Table:
        rows, columns, notes, unit = ("<b>run</b>",), (), ("<i>note</i>",), "mm"

        def line(self, row: str) -> list[object]:
            return []

    page = pages.render("compare.html.j2", table=Table(), boxplots="", qualitative=None)
    assert "<b>run</b>" not in page
    assert "&lt;b&gt;run&lt;/b&gt;" in page
    assert "&lt;i&gt;note&lt;/i&gt;" in page

"""docs/equations.md names functions and tests; all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py):(\w+)`", (ROOT / "docs" / "equations.md").read_text(encoding="utf-8"))))


def defined(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_the_page_names_exists(file: str, name: str) -> None:
    base = ROOT / ("tests" if name.startswith("test_") else "src/pclmix")
    assert name in defined(base / file)


def test_the_page_names_every_public_function_of_the_losses() -> None:
    named = set(NAMED)
    assert len(named) > 30
    for module in ("partial_ce", "uncertainty", "consistency", "total"):
        file = f"losses/{module}.py"
        for name in defined(ROOT / "src/pclmix" / file):
            assert (file, name) in named


def test_every_equation_has_a_row() -> None:
    page = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([\d, ]+)[^|]*\|", page, flags=re.MULTILINE)
    assert {int(n) for cell in cells for n in re.findall(r"\d+", cell)} == set(range(1, 14))

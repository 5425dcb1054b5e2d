"""docs/methods.md has a row for every method."""

from __future__ import annotations

import re
from pathlib import Path

from pclmix.methods.base import METHODS, load_all

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"


def test_the_page_has_a_row_for_every_method() -> None:
    load_all()
    table = PAGE.read_text(encoding="utf-8").split("\n\n")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == set(METHODS.names())

"""Extension of Griffe: examples in docstrings, which are not indented, become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around every example, and leaves a package's imports to the modules that define them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if isinstance(obj, griffe.Module) and obj.parent is not None:
            obj.exports = None  # what a package imports from its modules is shown there
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda match: f"\n```pycon\n{match[0]}\n```\n", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self.on_object(obj=pkg)  # Griffe calls it for what is inside alone

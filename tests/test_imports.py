"""Imports follow the order of folders in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "pclmix"
TIERS = (
    ("io",),
    ("kernels",),
    ("data", "nets", "losses"),
    ("mixing", "synth"),
    ("methods",),
    ("training",),
    ("inference", "metrics"),
    ("cluster", "report", "export"),
    ("studies",),
    ("web", "cli"),
)
#: Folders of one tier that may not import each other.
STRANGERS = ("data", "nets", "losses", "mixing", "synth")
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(module: str) -> str:
    """`pclmix.data.store` -> `data`; `pclmix` itself -> ``."""
    return f"{module}.".split(".")[1]


def tier_of(part: str) -> int:
    """0 for base files, then counted up."""
    return next((n for n, tier in enumerate(TIERS, start=1) if part in tier), 0)


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module of the package that a file names, at the top or inside a function, and the line it does so."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [node.module or ""]
            if node.module == "pclmix":  # of the package itself: its modules, not what __init__ defines
                names = [f"pclmix.{alias.name}" for alias in node.names if tier_of(alias.name) or is_module(alias.name)]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "pclmix")


def is_module(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part_of(name_of(path))
    if own in ("", "__main__"):
        return  # lazy imports of the public interface
    for module, line in imports(path):
        other = part_of(module)
        where = f"{path.relative_to(SOURCE)}:{line} imports {module}"
        assert tier_of(other) <= tier_of(own), f"{where}, which comes later"
        allowed = {("mixing", "losses"), ("synth", "data")}
        if own in STRANGERS and other in STRANGERS and own != other:
            assert (own, other) in allowed, f"{where}: these folders may not import each other"


def test_import_order_covers_real_imports() -> None:
    found = {part_of(name_of(path)) for path in MODULES}
    assert {
        "io",
        "data",
        "nets",
        "losses",
        "mixing",
        "methods",
        "training",
        "inference",
        "metrics",
        "report",
        "cli",
    } <= found
    edges = {(part_of(name_of(path)), part_of(module)) for path in MODULES for module, _ in imports(path)}
    assert {("training", "methods"), ("methods", "losses"), ("cli", "training"), ("data", "labels")} <= edges


def test_architecture_page_lists_every_folder() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == folders | {"mixing"}
    for name in re.findall(r"`(\w+/\w+\.py)", page):
        assert (SOURCE / name).is_file() or (SOURCE.parents[1] / name).is_file(), name

"""What the documentation shows runs: doctests of every module, and the quickstart from its first line to its last."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pclmix
from pclmix.cli import app
from pclmix.synth.phantom import make_phantom

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pclmix"


def modules_with_examples() -> list[str]:
    found = [path for path in sorted(SOURCE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__") for path in found]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / ".cache"))
    return tmp_path


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings(name: str, folder: Path) -> None:
    if name == "pclmix":
        make_phantom(folder / "phantom", 3)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_submodules_load_on_first_use() -> None:
    """In a fresh interpreter, where no other test has imported them."""
    code = (
        "import sys, pclmix; assert 'numpy' not in sys.modules; assert callable(pclmix.evaluate);"
        "import numpy as np; a = np.ones((2, 2), bool);"
        "assert pclmix.metrics.dice(a, a) == 1 and pclmix.errors.PclmixError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="trian"):
        _ = pclmix.trian  # type: ignore[attr-defined]


def test_the_quickstart(folder: Path) -> None:
    """Every line that begins with `pclmix` in a console block, and every Python block, in the order they stand."""
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(console|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, "docs/quickstart.md", "exec"), names)
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "pclmix":
                done = CliRunner().invoke(app, arguments)
                assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"

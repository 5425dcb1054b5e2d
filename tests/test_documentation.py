"""The documentation's code runs: doctests of all modules, the tour, the quickstart and the notebooks."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from typer.testing import CliRunner

import pclmix
from pclmix.cli import app
from pclmix.synth.phantom import make_phantom

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pclmix"
NOTEBOOKS = ROOT / "docs" / "notebooks"


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


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_pages_run(page: str, folder: Path) -> None:
    """Every line that begins with `pclmix` in a block for a shell, and every Python block, in the order they stand.

    What they write, git ignores in a clone.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(sh|console|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    commands = []
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, page, "exec"), names)
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "pclmix" and arguments != ["demo"]:  # which has tests of its own
                commands.append(arguments[0])
                done = CliRunner().invoke(app, arguments)
                assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"
    assert {"phantom", "check", "train", "predict", "evaluate"} <= set(commands)
    written = [f"{path.name}/x" if path.is_dir() else path.name for path in folder.iterdir() if path.name != ".cache"]
    listed = subprocess.run(["git", "check-ignore", *written], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode <= 1:  # else this is no clone
        assert listed.stdout.splitlines() == written


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("equations", "STEPS = 5"),
        ("tutorial", "PATIENTS, STEPS = 5, 5"),
        pytest.param("equations", "", marks=pytest.mark.slow),
        pytest.param("tutorial", "", marks=pytest.mark.slow),
    ],
)
def test_notebooks_run(name: str, settings: str, folder: Path) -> None:
    """With little training here; as they are in `make slow`."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = settings or parameters.source
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder)}}).execute()
    if name == "tutorial":
        content = json.loads((folder / "tutorial" / "run" / "evaluation.json").read_text())
        assert content["mean"]["Dice"] > (0.0 if settings else 0.75)


@pytest.mark.parametrize("name", ["equations", "tutorial"])
def test_notebooks_hold_small_outputs_of_one_run(name: str) -> None:
    """The site shows what is stored: all cells ran in order, without an error, and nothing names a folder outside."""
    path = NOTEBOOKS / f"{name}.ipynb"
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    text = "".join(output.get("text", "") for output in outputs)
    assert not re.search(r"(?<!\S)/\w+/", text)
    assert path.stat().st_size < 400_000

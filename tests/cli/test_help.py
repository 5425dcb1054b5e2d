"""--help is fast, complete and has an example for every command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pclmix import __version__
from pclmix.cli import PANELS, app
from pclmix.config import Config, Optim, load_config
from pclmix.methods.base import require_fitting

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]
HEAVY = ("torch", "monai", "matplotlib", "scipy", "skimage", "nibabel", "numpy", "pydantic")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_help_does_not_import_torch() -> None:
    """Prints, in a separate process, what --help has imported."""
    program = (
        "import sys\nsys.argv = ['pclmix', '--help']\nfrom pclmix.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('imported:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "imported: []" in done.stdout
    assert "train" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str, answer: CliRunner) -> None:
    result = answer.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"pclmix {command}" in result.output.split("Example", 1)[1]
    assert GROUP.commands[command].help  # type: ignore[attr-defined]


def test_every_option_has_help() -> None:
    for name, command in GROUP.commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"pclmix {name}: {parameter.name} has no help"


def test_every_command_is_in_a_panel() -> None:
    """`--help` lists the commands in the order of PANELS, and each once."""
    assert list(GROUP.commands) == [name for names in PANELS.values() for name in names]  # type: ignore[attr-defined]


def test_config_prints_a_recipe_that_gives_the_same_settings(answer: CliRunner, tmp_path: Path) -> None:
    printed = answer.invoke(app, ["config", "fast", "optim.lr=0.01", "params.anchors=7", "--method", "pclmix"])
    assert printed.exit_code == 0, printed.output
    (tmp_path / "mine.yaml").write_text(printed.output)
    expected = load_config("fast", "pclmix", ["optim.lr=0.01"])
    params = require_fitting(load_config("fast", "pclmix", ["params.anchors=7"])).model_dump(mode="json")
    found = load_config(str(tmp_path / "mine.yaml"))
    assert found.params == params
    assert found == expected.model_copy(update={"recipe": "mine", "params": params})
    for name, field in [*Config.model_fields.items(), *Optim.model_fields.items()]:
        first = " ".join((field.description or "").split()[:4])
        assert first in printed.output or name in ("recipe", "params"), name


def test_version(answer: CliRunner) -> None:
    assert answer.invoke(app, ["--version"]).output == f"pclmix {__version__}\n"


def test_shells_can_complete(answer: CliRunner) -> None:
    assert "--install-completion" in answer.invoke(app, ["--help"]).output


def test_short_and_long_help(answer: CliRunner) -> None:
    assert answer.invoke(app, ["train", "-h"]).output == answer.invoke(app, ["train", "--help"]).output


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "pclmix", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pclmix {__version__}\n"


@pytest.mark.parametrize(
    ("command", "default"), [("train", "pclmix"), ("crossval", "pclmix"), ("predict", "by device")]
)
def test_defaults_are_not_rendered_as_markup(answer: CliRunner, command: str, default: str) -> None:
    assert f"[default: ({default})]" in answer.invoke(app, [command, "--help"]).output

"""The command line answers at once, with an example for every command."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from pclmix import __version__
from pclmix.cli import app

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]
HEAVY = ("torch", "monai", "lightning_fabric", "matplotlib", "scipy", "skimage", "nibabel", "numpy", "pydantic")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_help_comes_without_torch() -> None:
    """In a process of its own: what is imported when help has been printed."""
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


def test_every_option_is_explained() -> None:
    for name, command in GROUP.commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"pclmix {name}: {parameter.name} has no help"


def test_version(answer: CliRunner) -> None:
    assert answer.invoke(app, ["--version"]).output == f"pclmix {__version__}\n"


def test_shells_can_complete(answer: CliRunner) -> None:
    assert "--install-completion" in answer.invoke(app, ["--help"]).output


def test_both_spellings_of_help(answer: CliRunner) -> None:
    assert answer.invoke(app, ["train", "-h"]).output == answer.invoke(app, ["train", "--help"]).output


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "pclmix", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pclmix {__version__}\n"


@pytest.mark.parametrize(("command", "default"), [("train", "pclmix"), ("crossval", "fast"), ("predict", "by device")])
def test_defaults_are_not_taken_for_markup(answer: CliRunner, command: str, default: str) -> None:
    assert f"[default: ({default})]" in answer.invoke(app, [command, "--help"]).output

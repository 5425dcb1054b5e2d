from __future__ import annotations

import json

from typer.testing import CliRunner

from pclmix.cli import app
from pclmix.methods.base import METHODS, load_all


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["methods", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_names_every_method_with_its_source_and_needs() -> None:
    load_all()
    text = run()
    for name, method in METHODS:
        assert name in text
        assert method.source.split()[0] in text
    assert "dense masks" in text


def test_tables_fit_a_narrow_terminal() -> None:
    result = CliRunner().invoke(app, ["methods", "--verbose"], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("pclmix") and "55.9 M" in line for line in lines)
    assert len(lines) < 100  # no column is so narrow that it has one letter per line


def test_json_counts_parameters() -> None:
    rows = {row["name"]: row for row in json.loads(run("--json", "--verbose"))}
    assert rows["full"]["needs"] == "dense masks"
    assert rows["trimix"]["inference_nets"] == ["net", "net2", "net3"]
    trimix = rows["trimix"]["parameters"]["unet"]
    assert trimix["training"] == 3 * trimix["inference"]
    # A teacher is not trained, and a second decoder does not predict.
    ustm, dmpls = rows["ustm"]["parameters"]["resnet50"], rows["dmpls"]["parameters"]["resnet50"]
    assert ustm["training"] == ustm["inference"]
    assert dmpls["training"] > dmpls["inference"]
    assert rows["pclmix"]["parameters"]["unet"] is None

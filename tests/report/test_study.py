"""Ablation and sweep: the variants, and a real sweep that goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from pclmix.config import load_config
from pclmix.data.phantom import make_phantom
from pclmix.errors import PclmixError
from pclmix.methods.base import build_params, find_method
from pclmix.report import study


def test_ablation_rows_turn_off_the_terms_of_the_papers_table() -> None:
    on = []
    for variant in study.ABLATION:
        params = build_params(find_method("pclmix"), load_config("tiny", "pclmix", variant.overrides).params)
        weights = params.model_dump()
        on.append(tuple(weights[key] > 0 for key in ("lambda_ctr", "lambda_het", "lambda_mix")))
        assert weights["supervise_t"] is (variant.name != "all, without pCE on Ft")
    o, x = True, False
    assert on == [(x, x, x), (o, x, x), (x, o, x), (x, o, o), (o, o, x), (o, o, o), (o, o, o)]


def test_sweep_takes_every_combination() -> None:
    variants = study.sweep_variants(["params.lambda_t=0.1,0.2", "optim.lr=1e-3, 1e-2", "seed=3"])
    assert [v.name for v in variants][:2] == ["lambda_t=0.1, lr=1e-3", "lambda_t=0.1, lr=1e-2"]
    assert len({v.folder for v in variants}) == 4
    assert variants[-1].overrides == ("params.lambda_t=0.2", "optim.lr=1e-2", "seed=3")


@pytest.mark.parametrize("grid", [["lambda_t"], ["=1,2"], ["seed="], ["seed=1,1"], ["seed=1"]])
def test_a_grid_that_is_none_is_refused(grid: list[str]) -> None:
    with pytest.raises(PclmixError, match=r"key=v1,v2|twice|nothing varies"):
        study.sweep_variants(grid)


@pytest.mark.slow
def test_a_sweep_ends_in_a_table_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    make_phantom(tmp_path / "data", 2, seed=1)
    variants = study.sweep_variants(["optim.lr=0.01,0.02", "engine.iterations=1"])

    def run(chosen: list[study.Variant]) -> None:
        console = Console(quiet=True)
        study.run_study(
            tmp_path / "data", tmp_path / "out", chosen, method="pce", recipe="tiny", jobs=2, console=console
        )

    with pytest.raises(PclmixError, match=r"unknown key .optim\.lrr."):
        run([*variants, study.Variant("bad", "bad", ("optim.lrr=1",))])
    assert not (tmp_path / "out").exists()
    run(variants)
    weights = [tmp_path / "out" / v.folder / "fold1" / "last.ckpt" for v in variants]
    before = [path.stat().st_mtime_ns for path in weights]
    rows = (tmp_path / "out" / study.TABLE / "table.csv").read_text().splitlines()
    assert sum("lr=0.0" in row for row in rows) >= 2
    assert (tmp_path / "out" / study.TABLE / "study.png").stat().st_size > 10_000
    lr = [json.loads((path.parent / "metrics.jsonl").read_text().splitlines()[0])["lr"] for path in weights]
    assert lr[0] == lr[1] == 0.001  # after the only step both schedules are at their end
    run(variants)
    assert [path.stat().st_mtime_ns for path in weights] == before

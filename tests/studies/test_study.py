"""Ablation and sweep: the variants, and a real sweep that resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from pclmix.config import load_config
from pclmix.errors import PclmixError
from pclmix.methods.base import build_params, find_method
from pclmix.studies import study
from pclmix.studies.plan import Settings
from pclmix.studies.study import ABLATION, sweep_variants
from pclmix.synth.phantom import make_phantom


def test_ablation_has_the_rows_of_the_paper() -> None:
    on = []
    for variant in ABLATION:
        params = build_params(find_method("pclmix"), load_config("tiny", "pclmix", variant.overrides).params)
        weights = params.model_dump()
        on.append(tuple(weights[key] > 0 for key in ("lambda_ctr", "lambda_het", "lambda_mix")))
        assert weights["supervise_t"] is (variant.name != "all, without pCE on Ft")
    o, x = True, False
    assert on == [(x, x, x), (o, x, x), (x, o, x), (x, o, o), (o, o, x), (o, o, o), (o, o, o)]


def test_sweep_has_every_combination() -> None:
    variants = sweep_variants(["params.lambda_t=0.1,0.2", "optim.lr=1e-3, 1e-2", "seed=3"])
    assert [v.name for v in variants][:2] == ["lambda_t=0.1, lr=1e-3", "lambda_t=0.1, lr=1e-2"]
    assert len({v.folder for v in variants}) == 4
    assert variants[-1].overrides == ("params.lambda_t=0.2", "optim.lr=1e-2", "seed=3")


def test_method_is_a_key_of_a_sweep() -> None:
    variants = sweep_variants(["method=pce,pclmix", "seed=1,2"])
    assert [(v.name, v.method, v.overrides) for v in variants][:2] == [
        ("method=pce, seed=1", "pce", ("seed=1",)),
        ("method=pce, seed=2", "pce", ("seed=2",)),
    ]
    common = Settings("em", "tiny", ("engine.iterations=1",))
    assert variants[-1].settings(common) == Settings("pclmix", "tiny", ("engine.iterations=1", "seed=2"))


@pytest.mark.parametrize("grid", [["lambda_t"], ["=1,2"], ["seed="], ["seed=1,1"], ["seed=1"]])
def test_refuses_grids_without_values(grid: list[str]) -> None:
    with pytest.raises(PclmixError):
        sweep_variants(grid)


@pytest.mark.slow
def test_sweep_writes_a_table_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    make_phantom(tmp_path / "data", 2, seed=1)
    variants = sweep_variants(["method=pce,em", "optim.lr=0.01,0.02"])
    settings = Settings(None, "tiny", ("engine.iterations=1",))

    def run(chosen: list[study.Variant]) -> None:
        console = Console(quiet=True)
        study.run_study(tmp_path / "data", tmp_path / "out", chosen, settings, kind="sweep", console=console)

    with pytest.raises(PclmixError, match=r"optim\.lrr"):
        run([*variants, study.Variant("bad", "bad", ("optim.lrr=1",))])
    assert not (tmp_path / "out").exists()
    run(variants)
    weights = [tmp_path / "out" / v.folder / "fold1" / "last.ckpt" for v in variants]
    before = [path.stat().st_mtime_ns for path in weights]
    rows = (tmp_path / "out" / study.TABLE / "table.csv").read_text().splitlines()
    assert {row.split('"')[1] for row in rows if row.startswith('"')} >= {variant.name for variant in variants}
    assert (tmp_path / "out" / study.TABLE / "study.png").stat().st_size > 10_000
    lr = [json.loads((path.parent / "metrics.jsonl").read_text().splitlines()[0])["lr"] for path in weights]
    assert set(lr) == {0.001}  # after the only step both schedules are at their end
    run(variants)
    assert [path.stat().st_mtime_ns for path in weights] == before

"""Figures in the documentation are the ones that runs wrote."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pclmix.errors import PclmixError
from pclmix.evaluate import Summary, read_summary
from pclmix.evaluate.metrics import Scores
from pclmix.evaluate.summary import CaseScores

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "results.py"
NAMES = ("RV", "Myo", "LV")
COLUMNS = ("raw", "tta", "component", "tta_component")
PARAMS = {"lambda_ctr": 0.15, "lambda_het": 1.0, "lambda_mix": 1.0, "supervise_t": True}


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """benchmarks/results.py as a module, its neighbours beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        import results

        yield results


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "published.json", tmp_path / "results")
    (tmp_path / "README.md").write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    return tmp_path


def scored(dice: float, hd95: float = 4.0) -> Scores:
    return Scores("scored", dice, hd95, hd95, 1.0, 100.0, 100.0)


def write_run(
    folder: Path,
    dice: float,
    *,
    fold: int = 1,
    method: str = "pclmix",
    columns: tuple[str, ...] = COLUMNS,
    **params: Any,
) -> Path:
    """A run of ten cases around a Dice; the second column is better by 0.01 and so on."""
    rng = np.random.default_rng(int(1000 * dice) + fold)
    folder.mkdir(parents=True)
    for rise, column in enumerate(columns):
        spread = rng.normal(0, 0.01, (10, 3))
        spread += dice + 0.01 * rise - spread.mean()
        cases = [
            CaseScores(
                f"patient{fold}{n:02d}", {name: scored(spread[n, k], 9.0 - rise) for k, name in enumerate(NAMES)}
            )
            for n in range(10)
        ]
        Summary(NAMES, tuple(cases)).write_csv(folder / f"{column}.csv")
    made = {"device": "NVIDIA H200", "commit": "abc1234"}
    content = {"fold": fold, "steps": 6000, "training_minutes": 2.5 + fold / 10, "columns": {}, "environment": made}
    (folder / "summary.json").write_text(json.dumps(content))
    config = {"recipe": "fast", "method": method, "net": "resnet50", "seed": 0, "params": {**PARAMS, **params}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def write_about(root: Path, group: str, **about: Any) -> Path:
    path = root / "results" / "acdc" / group / "about.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"title": group, **about}))
    return path.parent


def write_curve(run: Path, end: float) -> None:
    lines = [f"{n},{n / 2000},{end * n / 6000},5" for n in (2000, 4000, 6000)]
    (run / "curve.csv").write_text("\n".join(["step,minutes,Dice,HD95_50", *lines]) + "\n")


def frozen(root: Path) -> Path:
    group = write_about(root, "fast", order=["fold2", "fold3"], pooled=True, readme=True, note="Frozen.")
    for fold, dice in ((2, 0.88), (3, 0.90)):
        write_curve(write_run(group / f"fold{fold}", dice, fold=fold), dice)
    return group


def methods(root: Path) -> Path:
    order = ["full", "pce", "cyclemix", "trimix", "pclmix"]
    text = {"full": "upper bound", "pclmix": "PCLMix"}
    group = write_about(root, "methods", order=order, text=text, against="pclmix", readme=True)
    for name, dice in zip(order, (0.95, 0.60, 0.85, 0.86, 0.90), strict=True):
        extra = ("net2", "net3", "ensemble") if name == "trimix" else ()
        write_curve(write_run(group / name, dice, method=name, columns=(*COLUMNS, *extra)), dice)
    return group


def rows(text: str, start: str) -> list[list[str]]:
    """Cells of the lines of tables that begin with a label."""
    return [
        [c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith(f"| {start}")
    ]


def test_the_documents_are_what_the_files_say() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_means_kept_beside_the_cases_are_their_means() -> None:
    kept = sorted((ROOT / "results" / "acdc").glob("*/*/summary.json"))
    assert kept
    for path in kept:
        for column, content in json.loads(path.read_text())["columns"].items():
            table = path.with_name(f"{column}.csv")
            if column == "nets_mean" and not table.is_file():
                continue
            for measure in ("Dice", "HD95_50"):
                mean = read_summary(table).mean(measure).mean
                assert mean == pytest.approx(content["mean"][measure], rel=1e-4), f"{table} {measure}"


def test_without_any_group_there_is_a_page_and_nothing_is_stale_after_writing(script: Any, root: Path) -> None:
    assert len(script.update(root, check=True)) == 2
    script.update(root, check=False)
    assert script.update(root, check=True) == []
    assert "## ACDC" not in (root / "docs" / "results.md").read_text()
    readme = (root / "README.md").read_text()
    assert readme.startswith("before\n<!-- results -->\n")
    assert readme.endswith("<!-- /results -->\nafter\n")
    assert "old" not in readme
    assert "docs/results.md" in readme


def test_a_frozen_recipe_is_pooled_and_stands_beside_the_paper(script: Any, root: Path) -> None:
    frozen(root)
    page = script.page(root)
    raw = rows(page, "raw")[0]
    assert raw[7].startswith("89.0 (")
    assert raw[8] == "9.0 (0.0)"
    assert rows(page, "flips, component")[0][7].startswith("**92.0 (")
    assert "over 20 cases" in page
    assert rows(page, "*PCLMix, paper, folds 1 to 5*")[0][-2:] == ["88.7", "4.1"]
    assert rows(page, "*PCLMix, paper, folds 2 to 5*")[0][-2:] == ["88.5", "4.4"]
    assert rows(page, "[fold3](../results/acdc/fast/fold3)")[0][1:] == (
        ["3", "fast", "resnet50", "0", "6000", "2.80", "NVIDIA H200", "abc1234"]
    )
    section = script.readme_section(root)
    assert "folds 2, 3, 20 volumes; 6,000 steps in 2.7 to 2.8 minutes" in section
    assert "Dice 89.0, HD95 9.0 mm without any post-processing; the paper's PCLMix has 88.7 and 4.1" in section


def test_methods_are_ranked_tested_and_have_the_papers_figure(script: Any, root: Path) -> None:
    methods(root)
    for text in (script.page(root), script.readme_section(root)):
        dice = {name: rows(text, name)[0][-3] for name in ("upper bound", "pce", "cyclemix", "trimix", "PCLMix")}
        assert dice["PCLMix"].startswith("**90.0 (")
        assert dice["upper bound"].startswith("95.0 (")
        assert dice["pce"].startswith("60.0 (")
        assert dice["pce"].endswith("†")
        # Of TriMix's networks none is chosen: 86, and the fifth and sixth columns, 90 and 91.
        assert dice["trimix"].startswith("<u>89.0 (")
        paper = {name: rows(text, name)[0][-1] for name in ("pce", "cyclemix", "PCLMix")}
        assert paper == {"pce": "68.6 / 173.3", "cyclemix": "–", "PCLMix": "88.7 / 4.1"}
    page = script.page(root)
    assert "Not ranked: upper bound." in page
    assert "against PCLMix: Wilcoxon" in page
    assert "trimix: the mean of its networks' scores, each alone." in page
    assert rows(page, "trimix")[1][5:] == ["90.0 / 5.0", "91.0 / 4.0", "89.0 / 6.0", "92.0 / 3.0"]
    assert "†, ‡: p < 0.05, p < 0.01 against PCLMix." in script.readme_section(root)


def test_an_ablation_has_the_papers_rows_by_its_terms(script: Any, root: Path) -> None:
    group = write_about(root, "ablation", order=["sup", "without-pce", "all"])
    write_run(group / "sup", 0.5, lambda_ctr=0, lambda_het=0, lambda_mix=0)
    write_run(group / "without-pce", 0.8, supervise_t=False)
    write_run(group / "all", 0.9)
    page = script.page(root)
    found = [rows(page, name)[0][-1] for name in ("sup", "without-pce", "all")]
    assert found == ["54.1 / 179.8", "88.1 / 4.9", "88.7 / 4.1"]


def test_runs_not_made_are_named_and_runs_not_listed_are_shown(script: Any, root: Path) -> None:
    group = write_about(root, "choices", order=["later", "first"], column="component")
    write_run(group / "first", 0.8)
    write_run(group / "unlisted", 0.7)
    write_about(root, "precision", order=["fp32"])
    page = script.page(root)
    assert "Planned and not run: later." in page
    assert "precision" not in page
    assert rows(page, "first")[0][7].startswith("**82.0 (")
    assert rows(page, "unlisted")


@pytest.mark.parametrize("changed", ["README.md", "docs/results.md", "curve", "cases", "picture"])
def test_the_check_finds_what_is_not_so(script: Any, root: Path, changed: str) -> None:
    group = frozen(root)
    script.update(root, check=False)
    assert script.update(root, check=True) == []
    if changed == "curve":
        write_curve(group / "fold2", 0.5)
    elif changed == "cases":
        shutil.copy(group / "fold2" / "tta.csv", group / "fold2" / "raw.csv")
    elif changed == "picture":
        (root / "docs" / "curves.png").unlink()
    else:
        path = root / changed
        path.write_text(path.read_text().replace("89.0", "99.0"))
    stale = [Path(path).name for path in script.update(root, check=True)]
    expected = {"curve": ["curves.png"], "picture": ["curves.png"], "cases": ["results.md", "README.md"]}
    assert stale == expected.get(changed, [Path(changed).name])


def test_the_command_fails_and_names_the_file(root: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check", "--root", str(root)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "results.md" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_picture_goes_with_its_curves(script: Any, root: Path) -> None:
    frozen(root)
    methods(root)
    script.update(root, check=False)
    picture = root / "docs" / "curves.png"
    assert picture.is_file()
    assert "curves.png" in (root / "docs" / "results.md").read_text()
    for curve in root.rglob("curve.csv"):
        curve.unlink()
    script.update(root, check=False)
    assert not picture.exists()
    assert "curves.png" not in (root / "docs" / "results.md").read_text()


def test_the_mean_of_networks_by_hand(script: Any) -> None:
    from results_page.groups import mean_of_networks

    nan = math.nan
    empty = Scores("empty prediction", 0.0, nan, 50.0, nan, 0.0, 100.0)
    absent = Scores("absent", nan, nan, nan, nan, 0.0, 0.0)
    parts = [Summary(("a", "b"), (CaseScores("c", {"a": s, "b": absent}),)) for s in (scored(0.9), scored(0.6), empty)]
    mean = mean_of_networks(parts).cases[0].classes
    assert (mean["a"].dice, mean["a"].hd95, mean["a"].status) == (pytest.approx(0.5), 4.0, "empty prediction")
    assert mean["a"].hd95_50 == pytest.approx(58 / 3)
    assert math.isnan(mean["b"].dice)
    assert mean["b"].status == "absent"


def test_steps_of_methods_and_a_mark_over_the_limit(script: Any, root: Path) -> None:
    (root / "results" / "methods").mkdir()
    content = json.loads((ROOT / "results" / "methods" / "cpu-unet.json").read_text())
    content["rows"][0] |= {"ratio": 1.7, "peak_gib": 2.25}
    (root / "results" / "methods" / "h200-unet.json").write_text(json.dumps(content))
    line = rows(script.page(root), f"`{content['rows'][0]['method']}`")[0]
    assert line[4] == "1.70 over the limit"
    assert line[6] == "2.2"


def test_a_run_of_another_group_is_borrowed_and_shared_minutes_are_left_out(script: Any, root: Path) -> None:
    methods(root)
    about = {
        "title": "choices",
        "borrowed": {"plain": "methods/pclmix"},
        "text": {"plain": "as it was"},
        "readme": True,
    }
    write_run(write_about(root, "choices", **about) / "other", 0.8)
    text = script.page(root)
    assert "[as it was](../results/acdc/methods/pclmix)" in text
    assert rows(text, "as it was")[0][-2].startswith("**90.0 (")
    for shared in (False, True):
        write_about(root, "choices", **about, shared=shared)
        (line,) = (n for n in script.readme_section(root).splitlines() if n.startswith("**choices.**"))
        assert ("minutes of training a run" in line) is not shared


def test_a_borrowed_run_may_be_read_in_other_columns(script: Any, root: Path) -> None:
    both = write_about(root, "both", title="both")
    run = write_run(both / "fold3", 0.7, fold=3, columns=("raw", "offset none", "offset none component"))
    (run / "curve.csv").write_text("step,minutes,Dice,HD95_50\n1000,0.5,0.8,9\n")
    files = {"raw": "offset none", "component": "offset none component"}
    about = {"title": "plain", "pooled": True, "borrowed": {"fold3": "both/fold3"}, "columns": {"fold3": files}}
    write_run(write_about(root, "plain", **about) / "fold2", 0.9, fold=2)
    text = script.page(root)
    assert "no offset, component" in text
    pooled = text[text.index("### plain") :].splitlines()
    assert [n.split(" |")[0] for n in pooled if n.startswith(("| raw", "| largest", "| flips"))] == [
        "| raw", "| largest component",
    ]  # fmt: skip
    assert rows("\n".join(pooled), "raw")[0][-2].startswith("<u>80.5 (")  # fold 2 has 0.9, the other 0.7 + 0.01
    assert rows("\n".join(pooled), "fold3")[0][1] == "71.0 / 8.0"
    assert list(script.curves.read_curves(script.read_groups(root))) == ["both"]


def test_rows_on_the_phantom_are_computed_from_their_cases(script: Any, root: Path) -> None:
    assert "phantom" not in script.page(root)
    folder = root / "results" / "rows"
    for name, dice in (("pclmix", 0.8), ("pce", 0.5), ("full", 0.9)):
        run = write_run(root / "made" / name, dice)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.csv").write_bytes((run / f"{COLUMNS[0]}.csv").read_bytes())
    about = {"recipe": "demo", "iterations": 300, "seed": 0, "methods": ["pclmix", "pce", "full"]}
    (folder / "rows.json").write_text(json.dumps({**about, "environment": {"commit": "abc1234"}}))
    text = script.page(root)
    assert "recipe `demo`, 300 steps each, seed 0, commit abc1234" in text
    assert rows(text, "pclmix")[0][7].startswith("**80.0 (")
    assert rows(text, "pce")[0][7].startswith("<u>50.0 (")
    assert "Not ranked: full." in text


def test_mistakes_are_named(script: Any, root: Path) -> None:
    group = write_about(root, "twice", pooled=True)
    write_run(group / "one", 0.8)
    write_run(group / "two", 0.9)
    with pytest.raises(PclmixError, match="pooled runs share cases"):
        script.page(root)
    write_about(root, "twice", text={"one": "same", "two": "same"})
    with pytest.raises(PclmixError, match="two runs are called 'same'"):
        script.page(root)
    shutil.rmtree(group)
    (root / "README.md").write_text("no markers")
    with pytest.raises(PclmixError, match=r"README\.md has no lines <!-- results -->"):
        script.update(root, check=True)

"""`pclmix compare`: every format, nnU-Net's files, ranks, tests and figures."""

import csv
import json
import math
import re
import sys

import numpy as np
import pytest

from pclmix.cli import main
from pclmix.data.dataset import Split, write_dataset_json, write_splits
from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry, write_labels, write_map
from pclmix.labels import Labels
from pclmix.metrics import evaluate
from pclmix.report import tables
from pclmix.report.pages import compare
from pclmix.report.qualitative import median_case
from pclmix.report.tables import read_runs

SHAPE, SPACING = (3, 28, 26), (8.0, 1.5, 1.25)
CASES = tuple(f"p{i}_{frame}" for i in range(1, 6) for frame in ("ED", "ES"))
LABELS = Labels(("background", "RV", "Myo"), 3)


def truth(seed):
    y, x = np.mgrid[: SHAPE[1], : SHAPE[2]]
    out = np.zeros(SHAPE, np.uint8)
    out[:, (y - 9) ** 2 + (x - 8 - seed % 3) ** 2 < 26] = 1
    out[:, (y - 19) ** 2 + (x - 15) ** 2 < 16 + seed] = 2
    return out


def save(folder, case, array):
    folder.mkdir(exist_ok=True, parents=True)
    write_labels(folder / f"{case}.nii.gz", array, Geometry(array.shape, SPACING))


@pytest.fixture
def root(tmp_path):
    """A dataset of ten cases, and under runs/ three sets of predictions, each worse than the one before."""
    data = tmp_path / "data"
    for i, case in enumerate(CASES):
        dense = truth(i)
        save(data / "referenceTr", case, dense)
        scribble = np.full(SHAPE, 3, np.uint8)
        scribble[:, 9, 6:11], scribble[:, 19, 13:17], scribble[:, 2, :] = 1, 2, 0
        save(data / "labelsTr", case, scribble)
        image = data / "imagesTr" / f"{case}_0000.nii.gz"
        write_map(image, dense + np.random.default_rng(i).normal(0, 0.2, SHAPE), Geometry(SHAPE, SPACING))
        for name, shift in (("good", 1), ("fair", 2), ("poor", 4)):
            moved = np.roll(dense, shift + (i % 2 if shift > 1 else 0), axis=2)
            if name == "poor" and i == 3:
                moved[moved == 1] = 0
            save(tmp_path / "runs" / name / "predictions", case, moved)
    write_dataset_json(data, channels=["MRI"], labels=LABELS, ending=".nii.gz", cases=len(CASES))
    write_splits(data, [Split((), CASES)])
    for name in ("good", "fair", "poor"):
        folder = tmp_path / "runs" / name
        summary = evaluate(folder, data)
        summary.write_json(folder / "evaluation.json")
        summary.write_csv(folder / "cases.csv")
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["pclmix", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


def nnunet(path, summary):
    """A summary.json as nnU-Net v2 writes it, with NaN."""
    entries = []
    for case in summary.cases:
        rows = {}
        for k, name in enumerate(summary.names, start=1):
            s = case.classes[name]
            rows[str(k)] = {"Dice": s.dice, "n_pred": int(s.volume_ml > 0), "n_ref": int(s.reference_ml > 0)}
        files = {"prediction_file": f"/x/{case.case}.nii.gz", "reference_file": f"/y/{case.case}.nii.gz"}
        entries.append({"metrics": rows, **files})
    path.write_text(json.dumps({"foreground_mean": {}, "mean": {}, "metric_per_case": entries}))


def test_writes_every_format(root, monkeypatch, capsys):
    out, runs = root / "out", root / "runs"
    code = run(
        monkeypatch, "compare", f"Ours={runs / 'good'}", runs / "fair" / "evaluation.json", runs / "poor" / "cases.csv",
        "--out", out, "--against", "Ours", "--dataset", root / "data", "--unranked", "poor",
    )  # fmt: skip
    assert code == 0
    written = {path.name for path in out.iterdir()}
    assert written == {
        "table.md", "table.csv", "table.tex", "compare.json", "report.html",
        "boxplots.png", "boxplots.svg", "qualitative.png", "qualitative.svg",
    }  # fmt: skip
    text = (out / "table.md").read_text()
    assert text in capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("| | RV Dice ↑ | RV HD95 ↓ | Myo Dice ↑")
    assert "Avg HD95" in lines[0]
    assert lines[2].startswith("| Ours | **")
    assert "<u>" in lines[3]
    assert "‡" in lines[3] or "†" in lines[3]
    assert "<u>" not in lines[4]
    assert any("poor" in line and "1" in line for line in lines[5:])  # a note on its empty prediction
    rows = list(csv.DictReader((out / "table.csv").open()))
    summary = evaluate(runs / "fair", root / "data")
    assert float(rows[1]["RV Dice"]) == pytest.approx(100 * summary.of_class("RV", "Dice").mean, abs=1e-3)
    assert float(rows[1]["Avg HD95 sd"]) == pytest.approx(summary.mean("HD95_50").sd, abs=1e-3)
    latex = (out / "table.tex").read_text()
    assert r"\textbf{" in latex
    assert r"\underline{" in latex
    assert latex.count("{") == latex.count("}")
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page
    assert all(address.startswith(("#", "data:image/")) for address in re.findall(r'(?:src|href)="([^"]*)', page))
    content = json.loads((out / "compare.json").read_text())
    assert content["median_case"] in CASES
    assert content["rows"]["poor"]["columns"]["RV"]["HD95"]["nan"] == 1
    assert content["rows"]["poor"]["columns"]["RV"]["HD95_50"]["nan"] == 0
    assert run(monkeypatch, "compare", runs / "good", "--out", out) == 2
    assert str(out) in capsys.readouterr().err


def test_nnunet_summary_and_prediction_folders(root, monkeypatch):
    folder = root / "nnunet"
    for case in CASES:
        save(folder, case, np.roll(truth(CASES.index(case)), 1, axis=1))
    scored = evaluate(folder, root / "data")
    nnunet(folder / "summary.json", scored)
    plain = read_runs([str(folder)])[0]
    assert plain.name == "nnunet"
    assert plain.summary.names == ("1", "2")
    assert plain.summary.values("Dice") == pytest.approx(scored.values("Dice"))
    assert np.isnan(plain.summary.values("HD95_50")).all()
    both = read_runs([str(root / "runs" / "good"), f"theirs={folder / 'summary.json'}"])
    assert both[1].summary.names == ("RV", "Myo")
    measured = read_runs([str(folder)], root / "data")[0]
    assert measured.summary.values("HD95") == pytest.approx(scored.values("HD95"))
    out = root / "out"
    assert run(monkeypatch, "compare", root / "runs" / "good", folder / "summary.json", "--out", out) == 0
    assert "–" in (out / "table.md").read_text().splitlines()[3]


def test_nnunet_empty_masks_and_bad_files(tmp_path):
    rows = {"1": {"Dice": 0.0, "n_pred": 0, "n_ref": 5}, "2": {"Dice": math.nan, "n_pred": 0, "n_ref": 0}}
    rows["3"] = {"Dice": None, "n_pred": 0, "n_ref": 0}
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"metric_per_case": [{"metrics": rows, "prediction_file": "a/b/c1.nii.gz"}]}))
    case = read_runs([str(path)])[0].summary.cases[0]
    assert (case.case, case.classes["1"].status, case.classes["2"].status) == ("c1", "empty prediction", "absent")
    assert case.classes["3"].status == "absent"
    path.write_text(json.dumps({"metric_per_case": [{"metrics": {"(1, 2)": rows["1"]}, "prediction_file": "c"}]}))
    with pytest.raises(PclmixError, match=r"\(1, 2\)"):
        read_runs([str(path)])
    path.write_text(json.dumps({"metric_per_case": [{"metrics": {"1": {}}, "prediction_file": "c"}]}))
    with pytest.raises(PclmixError, match=re.escape(str(path))):
        read_runs([str(path)])
    path.write_text(json.dumps({"something": "else"}))
    with pytest.raises(PclmixError, match=re.escape(str(path))):
        read_runs([str(path)])


def test_refuses_equal_names_missing_files_and_other_classes(root, monkeypatch, capsys):
    good = root / "runs" / "good"
    assert [r.name for r in read_runs([str(good), f"a={good}", str(root / "runs" / "fair" / "cases.csv")])] == [
        "good",
        "a",
        "fair",
    ]
    with pytest.raises(PclmixError, match="good"):
        read_runs([str(good), str(good / "evaluation.json")])
    with pytest.raises(PclmixError, match="nowhere"):
        read_runs([str(root / "nowhere")])
    assert run(monkeypatch, "compare", good / "predictions", "--out", root / "o") == 2
    assert "--reference" in capsys.readouterr().err
    assert not (root / "o").exists()
    assert run(monkeypatch, "compare", good, "--out", root / "o", "--against", "goood") == 2
    assert "'good'" in capsys.readouterr().err
    other = json.loads((good / "evaluation.json").read_text().replace('"RV"', '"Spleen"'))
    (root / "other.json").write_text(json.dumps(other))
    with pytest.raises(PclmixError, match="Spleen"):
        read_runs([str(good), str(root / "other.json")])


def test_folder_with_one_evaluation_of_any_name(root):
    folder = root / "mine"
    folder.mkdir()
    (root / "runs" / "good" / "evaluation.json").rename(folder / "tuesday.json")
    (folder / "config.json").write_text("{}")
    assert read_runs([str(folder)])[0].name == "mine"
    (folder / "wednesday.json").write_text((folder / "tuesday.json").read_text())
    with pytest.raises(PclmixError, match=r"mine.*tuesday.*wednesday"):
        read_runs([str(folder)])


def test_scores_predictions_with_a_reference(root):
    runs = read_runs([str(root / "runs" / "fair" / "predictions")], root / "data", fold=1)
    assert runs[0].name == "fair"
    assert runs[0].summary.values("Dice") == pytest.approx(evaluate(root / "runs/fair", root / "data").values("Dice"))


def test_ranks_by_printed_values():
    assert tables._ranks({"a": 88.24, "b": 88.21, "c": 80.0, "d": 70.0}, largest=True) == {"a": 1, "b": 1, "c": 2}
    assert tables._ranks({"a": 5.0, "b": math.nan, "c": 4.0}, largest=False) == {"c": 1, "a": 2}
    assert tables._ranks({"a": 5.0}, largest=True) == {}


def test_note_on_rows_over_different_cases(root):
    runs = read_runs([str(root / "runs" / "good"), str(root / "runs" / "fair")])
    fewer = runs[1].summary.cases[:-1]
    object.__setattr__(runs[1].summary, "cases", fewer)
    table = tables.build(runs, against="good")
    assert any("good 10" in note and "fair 9" in note for note in table.notes)


def test_no_tests_without_a_chosen_row(root):
    runs = read_runs([str(root / "runs" / "good"), str(root / "runs" / "fair")])
    table = tables.build(runs, against=None)
    assert all(math.isnan(cell.p) for row in table.cells.values() for cells in row.values() for cell in cells.values())
    assert not any("Wilcoxon" in note for note in table.notes)
    assert table.cells["good"]["Avg"]["Dice"].rank == 1


def test_median_case(root):
    good = read_runs([str(root / "runs" / "fair")])[0]
    values = good.summary.by_case("Avg", "Dice")
    order = sorted(values, key=lambda case: (values[case], case))
    assert median_case(good, set(CASES)) == order[4]
    assert median_case(good, {order[7]}) == order[7]
    with pytest.raises(PclmixError, match="fair"):
        median_case(good, set())


def test_qualitative_figure_needs_predictions(root):
    for file in (root / "runs" / "good" / "predictions").iterdir():
        file.unlink()
    runs = read_runs([f"scores={root / 'runs' / 'good' / 'cases.csv'}"])
    with pytest.raises(PclmixError, match="scores"):
        compare(runs, root / "out", dataset=root / "data")
    assert not (root / "out").exists()
    compare(runs, root / "out")
    assert (root / "out" / "report.html").is_file()

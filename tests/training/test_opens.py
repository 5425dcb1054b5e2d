"""How often training opens the files of a dataset: each once, those of the test fold and dense masks never."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pclmix.data.dataset import Dataset
from pclmix.io.volume import write_image, write_labels

PLANNED = ("net=resnet10", "data.size=[64, 64]", "data.patch=null")
Opens = Callable[..., Counter[str]]


@pytest.fixture
def opens(tmp_path: Path, spawn: Callable[..., Any]) -> Opens:
    """Train two steps in a separate process and cache; returns how often it opened each file of a dataset."""

    def call(dataset: Path, *overrides: str, **options: Any) -> Counter[str]:
        environment = {"OPENS": str(tmp_path), "PCLMIX_CACHE": str(tmp_path / "cache")}
        log = tmp_path / "opens.txt"
        log.unlink(missing_ok=True)
        run = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        options = {"method": "pce", "environment": environment, **options}
        process, answer = spawn(dataset, run, "engine.iterations=2", *overrides, **options)
        process.join()
        assert json.loads(answer.read_text()) is True
        found = Counter(Path(line).resolve() for line in log.read_text().splitlines())
        folders = [(dataset / name).resolve() for name in ("imagesTr", "labelsTr", "referenceTr")]
        return Counter({f"{p.parent.name}/{p.name}": n for p, n in found.items() if p.parent in folders})

    return call


def files_of(dataset: Dataset, cases: tuple[str, ...], labels: str) -> dict[str, int]:
    """Each image and label file once."""
    names = [f"imagesTr/{path.name}" for case in cases for path in dataset.image_paths(case)]
    return dict.fromkeys([*names, *(f"{labels}/{case}{dataset.ending}" for case in cases)], 1)


@pytest.mark.parametrize("validation", ["0", "0.5"])
def test_each_file_is_opened_once(phantom: Path, opens: Opens, validation: str) -> None:
    dataset = Dataset.open(phantom)
    expected = files_of(dataset, dataset.fold(1).train, "labelsTr")
    setting = f"data.validation={validation}"
    assert opens(phantom, setting, fold=1) == expected, "on a cold start: hashed, checked and prepared at once"
    assert opens(phantom, setting, fold=1) == expected, "from the cache: hashed"


def test_a_plan_from_the_data_reads_no_file_again(phantom: Path, opens: Opens) -> None:
    dataset = Dataset.open(phantom)
    expected = files_of(dataset, dataset.fold(1).train, "labelsTr")
    assert opens(phantom, *PLANNED, fold=1, recipe=None) == expected


def test_dense_masks_are_opened_by_the_method_that_learns_from_them(phantom: Path, opens: Opens) -> None:
    dataset = Dataset.open(phantom)
    cases = dataset.fold(1).train
    expected = files_of(dataset, cases, "labelsTr") | files_of(dataset, cases, "referenceTr")
    assert opens(phantom, fold=1, method="full") == expected


@pytest.mark.parametrize("ending", [".nii", ".png", ".tif"])
def test_other_formats_are_opened_once(phantom: Path, tmp_path: Path, opens: Opens, ending: str) -> None:
    source = Dataset.open(phantom)
    root, cases = tmp_path / "data", []
    content = json.loads((phantom / "dataset.json").read_text())
    for case in source.cases:
        image, (label, geometry) = source.read_image(case), source.read_scribble(case)
        z = label.shape[0] // 2
        like = type(geometry)((1, *geometry.shape[1:]), geometry.spacing)
        (root / "imagesTr").mkdir(parents=True, exist_ok=True)
        (root / "labelsTr").mkdir(exist_ok=True)
        write_image(root / "imagesTr" / f"{case}_0000{ending}", (image.array[0, z : z + 1] // 16).astype("uint8"), like)
        stored = label[z : z + 1].copy()
        stored[stored < 0] = source.labels.ignore
        write_labels(root / "labelsTr" / f"{case}{ending}", stored, like)
        cases.append(case)
    (root / "dataset.json").write_text(json.dumps(content | {"file_ending": ending}))
    assert opens(root) == files_of(Dataset.open(root), tuple(cases), "labelsTr")


def test_one_rank_reads_for_all(phantom: Path, tmp_path: Path, spawn: Callable[..., Any]) -> None:
    from test_ranks import start_two

    environment = {"OPENS": str(tmp_path), "PCLMIX_CACHE": str(tmp_path / "cache")}
    options = {"method": "pce", "environment": environment}
    assert start_two(spawn, phantom, tmp_path / "run", "engine.iterations=2", **options) == [(0, True), (0, True)]
    counts = [
        Counter(line for line in (tmp_path / f"opens{rank}.txt").read_text().splitlines() if line.endswith(".nii.gz"))
        for rank in (0, 1)
    ]
    assert set(counts[0].values()) == {1}
    assert not counts[1]

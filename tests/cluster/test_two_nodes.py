"""A study on two nodes equals the same study in one process, wherever its files lie."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import pytest
import torch
from nodes import private_mounts

Start = Callable[..., "subprocess.Popen[str]"]
COMMON = ("--recipe", "tiny", "--folds", "1-2", "--device", "cpu", "--method", "pce", "optim.lr=0.3")


@pytest.fixture(scope="module")
def serial(phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study in one process with one thread."""
    root = tmp_path_factory.mktemp("serial")
    command = [sys.executable, "-m", "pclmix", "crossval", phantom_dataset, "--out", root / "cv", *COMMON]
    env = {"OMP_NUM_THREADS": "1", "PCLMIX_CACHE": str(root / "cache")}
    subprocess.run([*map(str, command), "--cores", "1"], check=True, env=_with(env), capture_output=True)
    return root / "cv"


def _with(env: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **env}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "last.ckpt", weights_only=True)["method"]


def same(one: Path, other: Path) -> None:
    for fold in ("fold1", "fold2"):
        for name in ("cases.csv", "metrics.jsonl", "training_cases.csv"):
            assert (one / fold / name).read_bytes() == (other / fold / name).read_bytes(), name
        maps = sorted((one / fold / "predictions").glob("*.nii.gz"))
        assert len(maps) == 2
        for path in maps:
            assert path.read_bytes() == (other / fold / "predictions" / path.name).read_bytes()
        first, second = weights(one / fold), weights(other / fold)
        assert list(first) == list(second)
        assert all(torch.equal(first[name], second[name]) for name in first)


def records(study: Path) -> list[dict[str, Any]]:
    return [json.loads((study / fold / "node.json").read_text()) for fold in ("fold1", "fold2")]


def test_two_nodes_equal_one_process(two_nodes: Any, pclmix: Start, phantom_dataset: Path, serial: Path) -> None:
    """Dataset and study lie where the second node sees an empty folder, so that Ray has to transfer both."""
    data, out = two_nodes.hidden / "data", two_nodes.hidden / "cv"
    shutil.copytree(phantom_dataset, data)
    driver = pclmix("crossval", data, "--out", out, *COMMON, "--cluster", two_nodes.address)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0, output
    same(serial, out)
    values = {v for path in out.rglob("predictions/*.nii.gz") for v in nib.load(path).get_fdata().ravel().tolist()}
    assert len(values) > 1, "the label maps hold nothing but background, so the comparison says little"
    assert {record["threads"] for record in records(out)} == {1}
    by_node = {record["address"]: record["dataset"] for record in records(out)}
    assert set(by_node) == {"127.0.0.2", "127.0.0.3"}
    if not private_mounts():
        pytest.skip("equal, but nothing was hidden from a node: that needs the right to unshare mounts")
    assert by_node == {"127.0.0.2": "read in place", "127.0.0.3": "carried to the node"}
    cache = two_nodes.root / "second" / "cache"
    assert len([path for path in (cache / "carried").iterdir() if path.is_dir()]) == 1
    assert not list((cache / "runs").rglob("*.ckpt")), "a run's scratch folder stays behind"
    assert str(cache) not in (out / "evaluation.json").read_text()
    for fold in ("fold1", "fold2"):
        for name in ("run.json", "evaluation.json", "predictions/prediction.json"):
            assert str(cache) not in (out / fold / name).read_text(), name


@pytest.mark.slow
def test_shared_folders_are_used_in_place(two_nodes: Any, pclmix: Start, phantom_dataset: Path, serial: Path) -> None:
    out = two_nodes.shared / "cv"
    driver = pclmix("crossval", phantom_dataset, "--out", out, *COMMON, "--cluster", two_nodes.address)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0, output
    same(serial, out)
    assert {record["address"] for record in records(out)} == {"127.0.0.2", "127.0.0.3"}
    assert {record["dataset"] for record in records(out)} == {"read in place"}


@pytest.mark.slow
def test_a_recipe_that_one_node_cannot_read_is_named_with_the_node(
    two_nodes: Any, pclmix: Start, phantom_dataset: Path
) -> None:
    if not private_mounts():
        pytest.skip("hiding a folder from one node needs the right to unshare mounts")
    recipe = two_nodes.hidden / "mine.yaml"
    recipe.write_text("net: resnet10\n")
    out = two_nodes.shared / "recipe"
    driver = pclmix("crossval", phantom_dataset, "--out", out, "--recipe", recipe, "--cluster", two_nodes.address)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 2
    assert "127.0.0.3" in output
    assert str(recipe) in output
    assert not list(out.glob("fold*"))

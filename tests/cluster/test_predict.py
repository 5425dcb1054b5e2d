"""An archive predicted on two nodes equals the same archive predicted in one process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nodes import private_mounts

from pclmix.inference import load
from pclmix.inference.files import predict_files

pytestmark = pytest.mark.slow
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def archive(phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images, with an invalid one in the middle."""
    folder = tmp_path_factory.mktemp("archive")
    for image in sorted((phantom_dataset / "imagesTr").glob("*.nii.gz")):
        case = image.name.removesuffix("_0000.nii.gz")
        for copy in "ab":
            shutil.copyfile(image, folder / f"{case}{copy}.nii.gz")
    (folder / "phantom002_broken.nii.gz").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def alone(archive: Path, lively_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    predict_files(load(lively_model, device="cpu"), archive, out, uncertainty=True, also=["slicer"])
    return out


def finish(driver: subprocess.Popen[str], code: int) -> str:
    output, _ = driver.communicate(timeout=240)
    assert driver.returncode == code, output
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_in_a_shared_folder(
    two_nodes: Any, pclmix: Start, archive: Path, alone: Path, lively_model: Path
) -> None:
    out = two_nodes.shared / "out"
    flags = ("--uncertainty", "--slicer", "--device", "cpu", "--cluster", two_nodes.address)
    output = finish(pclmix("predict", lively_model, archive, out, *flags), 2)
    assert "12 predicted" in output
    assert "1 of 13 cases could not be predicted" in output
    assert str(archive / "phantom002_broken.nii.gz") in output
    assert contents(out) == contents(alone)
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.nii.gz")}
    assert "0 predicted, 12 were there already" in finish(pclmix("predict", lively_model, archive, out, *flags), 2)
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.nii.gz")} == times


def test_archive_on_nodes_without_a_shared_folder(
    two_nodes: Any, pclmix: Start, archive: Path, alone: Path, lively_model: Path
) -> None:
    """The second node sees neither model nor images nor OUT."""
    if not private_mounts():
        pytest.skip("hiding a folder from one node needs the right to unshare mounts")
    model, images, out = (two_nodes.hidden / name for name in ("model.ckpt", "images", "out"))
    shutil.copyfile(lively_model, model)
    shutil.copytree(archive, images)
    flags = ("--uncertainty", "--slicer", "--device", "cpu", "--cluster", two_nodes.address)
    output = finish(pclmix("predict", model, images, out, *flags), 2)
    assert f"{images / 'phantom002_broken.nii.gz'}" in output
    found, expected = contents(out), contents(alone)
    assert found.pop("prediction.json") != expected["prediction.json"]  # it names the model's file
    assert found == {name: content for name, content in expected.items() if name != "prediction.json"}


@pytest.fixture
def many(archive: Path, tmp_path: Path) -> Path:
    """So many images that both workers are still at it when one is lost."""
    folder = tmp_path / "many"
    folder.mkdir()
    for image in archive.glob("*a.nii.gz"):
        for copy in range(60):
            (folder / image.name.replace("a.nii.gz", f"a{copy:02d}.nii.gz")).hardlink_to(image)
    return folder


def wait_for_second(two_nodes: Any, driver: subprocess.Popen[str]) -> int:
    """The worker on the second node, once it predicts."""
    while True:
        for pid in two_nodes.pids("second"):
            with suppress(OSError):
                if "Worker.predict" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    return int(pid)
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.002)


def complete(out: Path, alone: Path) -> None:
    found = sorted(out.glob("*.nii.gz"))
    assert len(found) == 360
    for path in found:
        assert path.read_bytes() == (alone / f"{path.name[:-9]}.nii.gz").read_bytes(), path.name


def test_predicts_all_cases_after_a_killed_worker(
    two_nodes: Any, pclmix: Start, many: Path, alone: Path, lively_model: Path
) -> None:
    out = two_nodes.shared / "killed"
    driver = pclmix("predict", lively_model, many, out, "--device", "cpu", "--cluster", two_nodes.address)
    os.kill(wait_for_second(two_nodes, driver), signal.SIGKILL)
    assert "360 predicted" in finish(driver, 0)
    complete(out, alone)


def test_predicts_all_cases_after_a_lost_node(
    two_nodes: Any, pclmix: Start, many: Path, alone: Path, lively_model: Path
) -> None:
    """Its worker does not fit elsewhere: the other one predicts the remaining cases."""
    out = two_nodes.shared / "lost"
    driver = pclmix("predict", lively_model, many, out, "--device", "cpu", "--cluster", two_nodes.address)
    try:
        wait_for_second(two_nodes, driver)
        two_nodes.kill("second")
        assert "360 predicted" in finish(driver, 0)
    finally:
        if "second" not in two_nodes.started:
            two_nodes.start("second")
            two_nodes.wait()
    complete(out, alone)


def test_an_exported_file_on_two_nodes(two_nodes: Any, pclmix: Start, archive: Path, lively_model: Path) -> None:
    pytest.importorskip("onnxruntime")
    from pclmix.export.onnx import export_onnx

    model, out = two_nodes.shared / "model.onnx", two_nodes.shared / "onnx"
    export_onnx(lively_model, model)
    flags = ("--device", "cpu", "--cluster", two_nodes.address)
    finish(pclmix("predict", model, archive, out, *flags), 2)
    here = two_nodes.root / "onnx-alone"
    predict_files(load(model, device="cpu"), archive, here)
    for path in here.glob("*.nii.gz"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_invalid_model_gives_one_message(two_nodes: Any, pclmix: Start, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.ckpt").write_bytes(b"no checkpoint")
    out = two_nodes.shared / "none"
    output = finish(pclmix("predict", tmp_path / "bad.ckpt", archive, out, "--cluster", two_nodes.address), 2)
    assert str(tmp_path / "bad.ckpt") in output
    assert "Traceback" not in output
    assert not out.exists()

"""A short slice of the fuzzer, and the files of its corpus: seeds are accepted, inputs that once failed do not fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("tifffile")
pytest.importorskip("pydicom")
pytest.importorskip("onnxruntime")

from readers import CORPUS, LARGEST
from server_requests import READERS

import pclmix.web.jobs
from fuzz import make_input, memory, seeds_of, try_input

#: Inputs of the slice for each reader; all of them take a few seconds.
COUNT = {name: 15 if reader.heavy else 40 for name, reader in READERS.items()}
FOUND = sorted(CORPUS.glob("*/found-*"))
SEED = 1  #: another than that of `make fuzz`


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PCLMIX_MAX_BYTES", str(LARGEST))
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(pclmix.web.jobs, "subprocess", pclmix.web.jobs.subprocess)  # put back after the test


@pytest.mark.parametrize("reader", sorted(READERS))
def test_seeds_are_accepted(reader: str, tmp_path: Path) -> None:
    for path in seeds_of(reader):
        outcome, said = try_input(reader, path, tmp_path / "work")
        assert outcome == "accepted" or reader in ("server", "monailabel", "http"), f"{path.name}: {said}"
        assert outcome != "finding", f"{path.name}: {said}"


@pytest.mark.parametrize("reader", sorted(READERS))
def test_damaged_inputs_are_refused(reader: str, tmp_path: Path) -> None:
    outcomes = []
    for number in range(COUNT[reader]):
        name, data = make_input(reader, SEED, number)
        (tmp_path / name).write_bytes(data)
        outcome, said = try_input(reader, tmp_path / name, tmp_path / "work")
        assert outcome != "finding", f"input {number} of {reader}: {said}"
        outcomes.append(outcome)
    assert "refused" in outcomes


@pytest.mark.parametrize("path", FOUND, ids=[f"{path.parent.name}/{path.name}" for path in FOUND])
def test_inputs_that_once_failed(path: Path, tmp_path: Path) -> None:
    outcome, said = try_input(path.parent.name, path, tmp_path / "work")
    assert outcome != "finding", said


def test_the_same_number_makes_the_same_input() -> None:
    for reader in READERS:
        assert make_input(reader, 0, 7) == make_input(reader, 0, 7)
    assert len({make_input("nifti", 0, number) for number in range(50)}) > 30


def test_failures_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another exception, a message that is too long and a memory error count; a short refusal does not."""
    from pclmix.errors import PclmixError

    path = tmp_path / "a.nii"
    path.write_bytes(b"x")

    def fail(error: Exception, cause: Exception | None = None) -> tuple[str, str]:
        def read(*_: object) -> None:
            raise error from cause

        monkeypatch.setitem(READERS, "nifti", READERS["nifti"].__class__(READERS["nifti"].mutate, read))
        return try_input("nifti", path, tmp_path / "work")

    assert fail(ValueError("x"))[0] == "finding"
    assert fail(RecursionError())[0] == "finding"
    assert fail(PclmixError("\n".join(["x"] * 4000)))[0] == "finding"
    assert fail(PclmixError(""))[0] == "finding"
    assert fail(PclmixError("no memory"), MemoryError())[0] == "finding"
    assert fail(PclmixError("no image")) == ("refused", "no image")
    assert not (tmp_path / "work").exists()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells the peak of a process")
def test_memory_is_that_of_this_process() -> None:
    assert memory("VmHWM") > 20 << 20

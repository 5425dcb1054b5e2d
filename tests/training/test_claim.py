"""Locks on run folders, validation of Python arguments, interrupted starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pclmix.errors import PclmixError
from pclmix.training.start import ClaimedError, claimed

Train = Callable[..., tuple[bool, str]]
HOLD = """
import sys
from pathlib import Path
from pclmix.training.start import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_second_process_is_refused(phantom: Path, tmp_path: Path, train: Train, holder: Any) -> None:
    run = tmp_path / "run"
    for resume in (False, True):
        with pytest.raises(PclmixError, match=re.escape(str(run))):
            train(phantom, run, resume=resume)
    assert not run.exists()
    holder.kill()  # however it ends
    holder.wait()
    with claimed(run):
        pass


def test_other_folders_are_free(tmp_path: Path, holder: Any) -> None:
    with claimed(tmp_path / "other"), claimed(tmp_path / "third"):
        pass


def test_links_to_a_folder_share_its_lock(tmp_path: Path, holder: Any) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ClaimedError), claimed(tmp_path / "link"):
        pass


def test_trains_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "file"))
    with claimed(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"overrides": [["seed=1"]]}, "overrides"),
        ({"fold": "1"}, "fold='1'"),
        ({"fold": True}, "fold=True"),
        ({"fold": 0}, "fold=0"),
        ({"devices": 1.0}, "devices=1.0"),
        ({"cases": "phantom001_frame01"}, "cases"),
    ],
)
def test_arguments_passed_from_python_are_validated(
    phantom: Path, tmp_path: Path, train: Train, options: dict[str, Any], key: str
) -> None:
    with pytest.raises(PclmixError, match=key):
        train(phantom, tmp_path / "run", *options.pop("overrides", ()), **options)
    assert not (tmp_path / "run").exists()


def test_resume_without_a_run_prints_a_note(phantom: Path, tmp_path: Path, train: Train) -> None:
    _, said = train(phantom, tmp_path / "run", "engine.iterations=1", method="pce", fold=2, resume=True)
    (note,) = (line for line in said.splitlines() if line.startswith(str(tmp_path / "run")))
    assert all(part in note for part in ("pce", "tiny", "fold 2"))
    (tmp_path / "plain").touch()
    with pytest.raises(PclmixError, match="plain"):
        train(phantom, tmp_path / "plain", resume=True)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, ""), (signal.SIGINT, "error: interrupted")])
def test_interrupted_preparation_leaves_no_files(
    phantom: Path, tmp_path: Path, number: signal.Signals, said: str
) -> None:
    """SIGTERM, as from a scheduler, or Ctrl-C, before there is anything to save."""
    cache, run = tmp_path / "cache", tmp_path / "run"
    command = ["train", phantom, "--out", run, "--recipe", "tiny", "--method", "rw", "--device", "cpu"]
    # A background shell lets its children ignore SIGINT; an interactive shell does not.
    heard = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pclmix.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", heard, *map(str, command), "data.size=[512,512]"],
        env={**os.environ, "PCLMIX_CACHE": str(cache)},
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = time.monotonic() + 600
    while not (cache.is_dir() and list(cache.glob(".*-????????/images.f16"))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=600)  # cases that are being prepared are completed first
    assert process.returncode == 128 + number
    assert error.strip() == said
    assert not run.exists()
    assert not list(cache.glob(".*-????????"))

"""Which processes are still there: a zombie is not, nor one that ends while it is asked about."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pclmix.distributed import _alive


def test_a_running_one_a_zombie_and_one_that_is_gone() -> None:
    assert _alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    limit = time.monotonic() + 30
    while _alive(child.pid):  # nobody has waited for it: it stays as a zombie
        assert time.monotonic() < limit
        time.sleep(0.01)
    child.wait()
    assert not _alive(child.pid)


def test_one_that_ends_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/stat").is_file():
        pytest.skip("this system has no /proc")

    def gone(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", gone)
    assert not _alive(os.getpid())

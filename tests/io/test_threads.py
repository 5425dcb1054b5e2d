"""Threads and the memory that a process with many of them keeps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

KEEPS = """
from pathlib import Path
from pclmix.io.threads import limit_heaps

def memory():
    return next(int(line.split()[1]) >> 10 for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS"))

assert limit_heaps()
for _ in range(3):
    large = b"x" * (20 << 20)  # by default, smaller blocks lie in the heap once this one is freed
    del large
before = memory()
blocks = [b"x" * (1 << 20) for _ in range(200)]
last = blocks[-1]
del blocks
print(memory() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_images_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPS], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 50  # MiB

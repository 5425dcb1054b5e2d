"""Threads of numerical libraries, set before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path


def set_threads() -> None:
    """One OpenMP thread for each core that this process may use, asleep while they wait for one another.

    By default they spin for a while. On a machine that is busy otherwise, that makes training many times slower. What
    the user has set in the environment is kept.
    """
    for name, value in thread_settings().items():
        os.environ.setdefault(name, value)


def thread_settings(processes: int = 1) -> dict[str, str]:
    """Environment variables for each of `processes` that share the cores, or the threads that the user allows."""
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(allowed) if allowed.isdecimal() else available_cores()
    policy = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    return {"OMP_WAIT_POLICY": policy, "OMP_NUM_THREADS": str(max(1, threads // processes))}


def available_cores() -> int:
    """Cores this process may run on, within the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(min(cores, _quota())))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """CPU seconds per second that the container may use; infinite where nothing says so."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")

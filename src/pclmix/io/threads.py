"""Threads: how many numerical libraries use, their share of the heap, and work on many files at once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar


def set_threads() -> None:
    """One OpenMP thread per available core; waiting threads sleep.

    By default they spin, which makes training many times slower on a busy machine. Settings in the environment are
    kept.
    """
    for name, value in thread_settings().items():
        os.environ.setdefault(name, value)


def thread_settings(processes: int = 1) -> dict[str, str]:
    """Environment variables for each of `processes` that share the cores or the user's number of threads."""
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(allowed) if allowed.isdecimal() else available_cores()
    policy = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    return {"OMP_WAIT_POLICY": policy, "OMP_NUM_THREADS": str(max(1, threads // processes))}


def limit_heaps() -> bool:
    """For servers: two heaps for all threads, and freed images go back to the system; whether that is possible here.

    By default glibc has eight heaps per core, and the size from which memory is returned grows with what is freed, so
    that a server with many threads grows for a long time. Call it before threads are started.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not glibc
        return False
    settings = {-8: 2, -3: 256 << 10, -1: 128 << 10}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    return {mallopt(key, value) for key, value in settings.items()} == {1}


def available_cores() -> int:
    """Cores that this process may use, within the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(min(cores, _quota())))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """CPU seconds per second that the container may use; infinite without a quota."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


T = TypeVar("T")
R = TypeVar("R")


def in_threads(
    work: Callable[[T], R], items: Sequence[T], label: str, *, show: bool = False, workers: int = 2
) -> list[R]:
    """`[work(item) for item in items]` in a few threads; a failure cancels items not started.

    Threads suffice: reading, inflating and NumPy release the GIL.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task(label, total=len(items))
        pool = ThreadPoolExecutor(workers)
        results = []
        try:
            for result in pool.map(work, items):
                results.append(result)
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)
        return results

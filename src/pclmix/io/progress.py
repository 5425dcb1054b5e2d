"""Work on many files at once, with a bar on stderr for the person who waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(
    work: Callable[[T], R], items: Sequence[T], label: str, *, show: bool = False, workers: int = 2
) -> list[R]:
    """`[work(item) for item in items]` in a few threads; the first failure stops what has not started.

    Threads are enough: reading, inflating and NumPy's loops let go of the interpreter lock.
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

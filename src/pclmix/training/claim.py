"""One process at a time trains into a run folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pclmix.data.store import cache_folder
from pclmix.errors import PclmixError


class ClaimedError(PclmixError):
    """Another process of this computer trains into the folder."""


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold `out` for this process, and refuse it where another one of this computer does.

    The lock lies in the cache, so that nothing is left in or beside `out`; the system releases it when the process
    ends, however that happens.
    """
    name = hashlib.blake2b(os.fsencode(Path(out).resolve()), digest_size=16).hexdigest()
    lock = FileLock(cache_folder() / "claimed" / name)
    try:
        (cache_folder() / "claimed").mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ClaimedError(
            f"another process is training into {out}; wait for it, stop it, or choose another --out"
        ) from None
    except (OSError, NotImplementedError):
        pass  # a cache that cannot hold locks is no reason not to train
    try:
        yield
    finally:
        lock.release()

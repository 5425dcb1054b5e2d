"""One process at a time trains into a run folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pclmix.data.store import cache_folder
from pclmix.errors import PclmixError

try:
    import fcntl
except ImportError:  # Windows: nothing to hold on to
    fcntl = None  # type: ignore[assignment]

RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK")


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold `out` for this process, and refuse where another one of this computer does.

    The lock lies in the cache, so that nothing is left in or beside `out`; it goes with the process, however that ends.
    Of the processes of one training the first speaks for all.
    """
    if fcntl is None or any(os.environ.get(rank, "0") != "0" for rank in RANKS):
        yield
        return
    name = hashlib.blake2b(os.fsencode(out.resolve()), digest_size=16).hexdigest()
    handle = _lock(cache_folder() / "claimed" / name, out)
    try:
        yield
    finally:
        if handle is not None:
            (cache_folder() / "claimed" / name).unlink(missing_ok=True)
            os.close(handle)


def _lock(path: Path, out: Path) -> int | None:
    """An open, locked file; None where the place cannot hold locks, which is no reason not to train."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(handle).st_ino:
                return handle
        except BlockingIOError as error:
            os.close(handle)
            raise PclmixError(
                f"another process is training into {out}; wait for it, stop it, or choose another --out"
            ) from error
        except FileNotFoundError:
            pass  # whoever had it has just removed it: a lock on a file that is gone holds nobody off
        except OSError:
            os.close(handle)
            return None
        os.close(handle)

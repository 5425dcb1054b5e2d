"""How large a file may be when it is unpacked: asked before decoding, for every format.

A few hundred kilobytes can hold gigabytes of zeros, and a header can claim any size.
"""

from __future__ import annotations

import os
from pathlib import Path

from pclmix.errors import PclmixError

VARIABLE = "PCLMIX_MAX_BYTES"
MAX_BYTES = 4 << 30  #: of one image, unpacked
MAX_JSON = 64 << 20  #: of a JSON file


def max_bytes() -> int:
    """The limit for one image: that of the environment variable PCLMIX_MAX_BYTES, else MAX_BYTES."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return MAX_BYTES
    if not text.isdecimal() or len(text) > 18 or int(text) == 0:
        raise PclmixError(f"{VARIABLE}={text[:40]}: a number of bytes is needed, such as {MAX_BYTES}")
    return int(text)


def require_size(path: Path, count: int) -> None:
    """Refuse an image that would take more than the limit in memory."""
    limit = max_bytes()
    if count > limit:
        raise PclmixError(
            f"{path} unpacks to {count / 2**20:,.0f} MiB, more than the {limit / 2**20:,.0f} MiB allowed; cut it into "
            f"parts, or set {VARIABLE} to {count} or more if the memory is there"
        )

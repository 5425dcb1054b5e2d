"""Helpers of the upload tests: a zip in memory, an upload, the files on disk."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any


def zipped(files: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def listing(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


def send(page: Any, name: str, content: bytes) -> Any:
    return page.client.post("/api/import", params={"name": name}, content=content)

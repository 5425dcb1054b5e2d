"""The dataset and its predictions as a zip, streamed: nothing is held in memory or written to disk."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES, SPLITS
from pclmix.web.predictions import PredictionBook
from pclmix.web.workspace import OutsideError, Workspace

_CHUNK = 1 << 20


class _Pipe(io.RawIOBase):
    """What zipfile writes, taken out piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self.pieces.append(piece)
        return len(piece)

    def take(self) -> bytes:
        taken, self.pieces = b"".join(self.pieces), []
        return taken


def dataset_files(workspace: Workspace) -> list[tuple[Path, str]]:
    """Files of the dataset with their names in the zip; links that lead elsewhere are left out."""
    root = workspace.root
    top = [root / name for name in ("dataset.json", SPLITS)]
    below = [p for name in (IMAGES, SCRIBBLES, REFERENCE) for p in sorted((root / name).glob("[!.]*"))]
    return [(p, p.relative_to(root).as_posix()) for p in (*top, *below) if _is_ours(workspace, p)]


def prediction_files(workspace: Workspace) -> list[tuple[Path, str]]:
    """The newest prediction of each case, with ITK-SNAP's names and colours beside them."""
    book = PredictionBook(workspace)
    found = []
    for case in workspace.refresh().cases:
        known = book.of(case)
        if known:
            path = book.folder(str(known[0]["run"])) / f"{case}.nii.gz"
            if _is_ours(workspace, path):
                found.append((path, f"predictions/{path.name}"))
    return found


def stream_zip(files: list[tuple[Path, str]], texts: dict[str, str] | None = None) -> Iterator[bytes]:
    """A zip of files and texts; stored as they are, for images are compressed already."""
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for name, text in (texts or {}).items():
            archive.writestr(name, text)
            yield pipe.take()
        for path, name in files:
            entry = zipfile.ZipInfo.from_file(path, name)
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                while chunk := source.read(_CHUNK):
                    target.write(chunk)
                    yield pipe.take()
            yield pipe.take()
    yield pipe.take()


def _is_ours(workspace: Workspace, path: Path) -> bool:
    try:
        return workspace.inside(path).is_file()
    except OutsideError:
        return False

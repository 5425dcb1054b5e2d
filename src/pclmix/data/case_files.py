"""The files of one case, each opened once: hashed, checked and preprocessed from the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pclmix.data.dataset import Dataset, read_channels
from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry, Volume, read_image, read_labels
from pclmix.labels import IntArray

Source = Literal["scribble", "reference"]


class CaseFiles:
    """Reads each file of a case when it is first asked for, and remembers what came of it."""

    def __init__(self, dataset: Dataset, case: str) -> None:
        self.dataset, self.case = dataset, case
        self._bytes: dict[Path, bytes] = {}  # read for the digest, not decoded yet
        self._known: dict[str, Any] = {}

    def label_path(self, source: Source) -> Path:
        find = self.dataset.scribble_path if source == "scribble" else self.dataset.reference_path
        return find(self.case)

    def digest(self, source: Source) -> bytes:
        """A hash of the image files and the labels of `source`; OSError where one cannot be read."""
        total = hashlib.blake2b(digest_size=16)
        for path in (*self.dataset.image_paths(self.case), self.label_path(source)):
            content = self.dataset.kept(path)
            self._bytes[path] = path.read_bytes() if content is None else content
            total.update(hashlib.blake2b(self._bytes[path], digest_size=16).digest())
        return total.digest()

    def image(self) -> Volume:
        """All channels, (C, Z, H, W)."""
        paths, count = self.dataset.image_paths(self.case), len(self.dataset.channels)
        volume: Volume = self._once("image", lambda: read_channels(paths, count, self._read_image))
        return volume

    def labels(self, source: Source) -> tuple[IntArray, Geometry]:
        """Classes and IGNORE, (Z, H, W). The reference is for evaluation and the upper-bound method only."""
        labels: tuple[IntArray, Geometry] = self._once(source, lambda: self._read_labels(self.label_path(source)))
        return labels

    def _read_image(self, path: Path) -> Volume:
        return read_image(path, self._content(path))

    def _read_labels(self, path: Path) -> tuple[IntArray, Geometry]:
        array, geometry = read_labels(path, self._content(path))
        return self.dataset.labels.decode(array, str(path)), geometry

    def _content(self, path: Path) -> bytes | None:
        return self._bytes.pop(path) if path in self._bytes else self.dataset.kept(path)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._known:
            try:
                self._known[name] = make()
            except PclmixError as error:
                self._known[name] = error
        if isinstance(self._known[name], PclmixError):
            raise self._known[name]
        return self._known[name]

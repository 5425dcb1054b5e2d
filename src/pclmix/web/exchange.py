"""What a viewer beside the page does with a dataset: take a case, send labels, predict, ask what to draw next."""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry
from pclmix.labels import IGNORE, IntArray
from pclmix.web.bench import Bench
from pclmix.web.labelfiles import decode, encode, read_upload
from pclmix.web.packing import require_bounded
from pclmix.web.workspace import UnknownError

_KEPT = 200  # views of cases that are remembered
Array = npt.NDArray[Any]


class Views:
    """What each client was last shown of a case: what it then sends differently, it has changed."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], tuple[bytes, tuple[int, ...]]] = OrderedDict()
        self._guard = threading.Lock()

    def note(self, client: str, case: str, array: IntArray) -> None:
        packed = zlib.compress((array + 1).astype(np.uint8).tobytes(), 1)
        with self._guard:
            self._seen[client, case] = packed, array.shape
            self._seen.move_to_end((client, case))
            while len(self._seen) > _KEPT:
                self._seen.popitem(last=False)

    def of(self, clients: list[str], case: str, shape: tuple[int, ...]) -> IntArray:
        """The last view of the first client that has one; nothing drawn where none is known."""
        with self._guard:
            found = next((self._seen[c, case] for c in clients if (c, case) in self._seen), None)
        if found is None or found[1] != shape:
            return np.full(shape, IGNORE, np.int16)
        values = np.frombuffer(zlib.decompress(found[0]), np.uint8).reshape(shape)
        return values.astype(np.int16) - 1


class Exchange:
    """The dataset of a bench for other programs."""

    def __init__(self, bench: Bench) -> None:
        if not bench.workspace.dataset.ending.startswith(".nii"):
            raise PclmixError(
                f"{bench.workspace.root} holds {bench.workspace.dataset.ending} pictures; --monailabel serves volumes "
                "in NIfTI. Leave it out to draw on the page"
            )
        self.bench, self.views = bench, Views()
        self._served: dict[str, float] = {}
        self._predictor: tuple[str, Any] | None = None
        self._predicting = threading.Lock()

    # Labels ---------------------------------------------------------------------------------------------------------
    def label(self, case: str, client: str) -> tuple[Array, Geometry]:
        """The strokes of a case as the values of a file; noted as what the client knows."""
        found = self.bench.strokes.read(case)
        if not (found.array >= 0).any():
            raise UnknownError(f"'{case}' has no label yet")
        self.views.note(client, case, found.array)
        return encode(found.array, self.bench.workspace.dataset.labels), found.geometry

    def save(self, case: str, path: Path, params: dict[str, Any], clients: list[str]) -> str:
        """Take a label. What was drawn on the page since the client last looked stays; returns the new version."""
        require_bounded(path, self.bench.limits.unpacked)
        geometry = self.bench.strokes.read(case).geometry
        values, named = read_upload(path, geometry, self.bench.limits.unpacked)
        labels, listed = self.bench.workspace.dataset.labels, _listed(params)
        mine = decode(values, labels, listed or named, params.get("kind") == "mask")
        version = self.bench.strokes.merge(case, mine, self.views.of(clients, case, mine.shape))
        for client in clients:
            self.views.note(client, case, mine)
        self.bench.bus.publish("strokes", case=case, version=version, client="")
        return version

    # Models ---------------------------------------------------------------------------------------------------------
    def newest_run(self) -> str | None:
        runs = self.bench.jobs.runs()
        return str(runs[0]["id"]) if runs else None

    def predict(self, case: str) -> tuple[Array, Geometry]:
        """Classes of the newest model, (Z, H, W). Nothing is written: a web form could ask for this."""
        run = self.newest_run()
        if run is None:
            raise UnknownError("there is no trained model yet; train one first")
        known = self.bench.predictions.of(self.bench.workspace.case(case))
        if known and known[0]["run"] == run:
            return self.bench.predictions.labels(case)
        with self._predicting:
            from pclmix.inference import load
            from pclmix.inference.inputs import require_same_task

            if self._predictor is None or self._predictor[0] != run:
                self._predictor = run, load(self.bench.jobs.run_folder(run))
            predictor, dataset = self._predictor[1], self.bench.workspace.dataset
            require_same_task(dataset, predictor.about.channels, predictor.about.labels)
            self.bench.workspace.image_paths(case)
            volume = dataset.read_image(case)
            return predictor.examine(volume.array).labels, volume.geometry

    def train(self, params: dict[str, Any]) -> str:
        """Start a training; a list is a choice with the chosen one first, as 3D Slicer sends them."""
        chosen = {key: value[0] if isinstance(value, list) and value else value for key, value in params.items()}
        minutes = chosen.get("minutes") or None
        if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes <= 10_000):
            raise PclmixError("minutes must be a number above 0, at most 10000; 0 leaves it to the recipe")
        cases = self.bench.cases.drawn()
        if not cases:
            raise PclmixError("nothing is drawn yet; draw strokes of every class in a few slices, then train")
        method, recipe = (
            str(chosen.get(key) or default)[:60] for key, default in (("method", "pclmix"), ("recipe", "fast"))
        )
        seconds = None if minutes is None else float(minutes) * 60
        return self.bench.jobs.train(method=method, recipe=recipe, seconds=seconds, then=cases[:0], cases=cases)

    # What next ------------------------------------------------------------------------------------------------------
    def next_case(self, strategy: str) -> str | None:
        """where_next: the least certain case not drawn on since it was predicted, then those without a stroke.

        first: the first case without a stroke. Where several are alike, the one that was not handed out for longest.
        """
        progress = self.bench.cases.progress()
        cases = [case for case, found in progress.items() if not found["problem"]]
        if not cases:
            return None

        def key(case: str) -> tuple[float, ...]:
            drawn, served = any(progress[case]["voxels"]), self._served.get(case, 0.0)
            known = self.bench.predictions.of(case)
            if strategy == "first" or not known:
                return (2.0 if drawn else 1.0, 0.0, served)
            touched = self._drawn_at(case) > float(known[0]["time"])
            return (3.0 if touched else 0.0, float(known[0].get("certainty", 0)), served)

        chosen = min(cases, key=key)
        self._served[chosen] = time.time()
        return chosen

    def _drawn_at(self, case: str) -> float:
        path = self.bench.workspace.scribble_path(case)
        return path.stat().st_mtime if path.exists() else 0.0


def _listed(params: dict[str, Any]) -> list[tuple[str, int]]:
    """Names and numbers of label_info."""
    entries = params.get("label_info") or []
    if not isinstance(entries, list):
        raise PclmixError("label_info must be a list of {name, idx}")
    found = []
    for place, entry in enumerate(entries[:256], start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise PclmixError("each entry of label_info needs a name")
        idx = entry.get("idx", place)
        if not isinstance(idx, int) or not 0 < idx < 65536:
            raise PclmixError("idx in label_info must be a whole number from 1 on")
        found.append((entry["name"], idx))
    return found

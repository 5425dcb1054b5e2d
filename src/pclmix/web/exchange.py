"""The dataset as MONAI Label clients see it: labels, predictions, training, the next case to annotate."""

from __future__ import annotations

import json
import secrets
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi.responses import Response

from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry, write_nrrd
from pclmix.labels import IGNORE, IntArray
from pclmix.web.archives import require_bounded
from pclmix.web.cases import display_nifti
from pclmix.web.common import Bench
from pclmix.web.jobs import PLAN
from pclmix.web.labelfiles import decode, encode, names, read_upload
from pclmix.web.workspace import UnknownError

_KEPT = 200  # views kept in memory
MODEL = "pclmix"
TAGS = ("original", "final")  #: both mean the current strokes: 3D Slicer opens a case with "original"
_STATES = {"running": "RUNNING", "stopping": "RUNNING", "finished": "DONE", "stopped": "CANCELED", "failed": "ERROR"}
Array = npt.NDArray[Any]


class Views:
    """The label map each client last saw of a case: differences in its next upload are its own edits."""

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
        """The last view of the first known client; an empty map if none is known."""
        with self._guard:
            found = next((self._seen[c, case] for c in clients if (c, case) in self._seen), None)
        if found is None or found[1] != shape:
            return np.full(shape, IGNORE, np.int16)
        values = np.frombuffer(zlib.decompress(found[0]), np.uint8).reshape(shape)
        return values.astype(np.int16) - 1


class Exchange:
    """The dataset for MONAI Label clients."""

    def __init__(self, bench: Bench) -> None:
        if not bench.workspace.dataset.ending.startswith(".nii"):
            raise PclmixError(
                f"{bench.workspace.root} contains {bench.workspace.dataset.ending} pictures; --monailabel serves NIfTI "
                "volumes only. Start without it to draw on the page"
            )
        self.bench, self.views = bench, Views()
        self._served: dict[str, float] = {}
        self._predictor: tuple[str, Any] | None = None
        self._predicting = threading.Lock()

    # Labels ---------------------------------------------------------------------------------------------------------
    def label(self, case: str, client: str) -> tuple[Array, Geometry]:
        """The strokes of a case as file values; recorded as the view of this client."""
        found = self.bench.strokes.read(case)
        if not (found.array >= 0).any():
            raise UnknownError(f"'{case}' has no label yet")
        self.views.note(client, case, found.array)
        return encode(found.array, self.bench.workspace.dataset.labels), found.geometry

    def save(self, case: str, path: Path, params: dict[str, Any], clients: list[str]) -> str:
        """Save an uploaded label, keeping strokes drawn elsewhere since. Returns the new version."""
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
        """Label map (Z, H, W) of the newest model. Nothing is written: a web form can send this request."""
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
        """Start training. 3D Slicer sends choices as lists with the selected one first."""
        chosen = {key: value[0] if isinstance(value, list) and value else value for key, value in params.items()}
        minutes = chosen.get("minutes") or None
        if minutes is not None and not (type(minutes) in (int, float) and 0 < minutes <= 10_000):
            raise PclmixError(
                "minutes must be a number above 0 and at most 10000; 0 or nothing means the duration of the recipe"
            )
        cases = self.bench.cases.drawn()
        if not cases:
            raise PclmixError("nothing is drawn yet; draw strokes of every class in a few slices, then train")
        method, recipe = (
            str(chosen.get(key) or default)[:60] for key, default in (("method", "pclmix"), ("recipe", PLAN))
        )
        seconds = None if minutes is None else float(minutes) * 60
        return self.bench.jobs.train(method=method, recipe=recipe, seconds=seconds, then=cases[:0], cases=cases)

    # What next ------------------------------------------------------------------------------------------------------
    def next_case(self, strategy: str) -> str | None:
        """The next case to annotate.

        where_next: the least certain case without strokes newer than its prediction, then cases without strokes.
        first: the first case without strokes. Ties go to the case served least recently.
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
    """Names and values from label_info."""
    entries = params.get("label_info") or []
    if not isinstance(entries, list):
        raise PclmixError("label_info must be a list of {name, idx}")
    found = []
    for place, entry in enumerate(entries[:256], start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise PclmixError("each entry of label_info needs a name")
        idx = entry.get("idx", place)
        if not isinstance(idx, int) or not 0 < idx < 65536:
            raise PclmixError("idx in label_info must be an integer from 1 to 65535")
        found.append((entry["name"], idx))
    return found


def predicted(exchange: Exchange, case: str, ending: str) -> Response:
    """A prediction as the multipart response clients expect: params, and the label map as a file."""
    array, geometry = exchange.predict(case)
    labels = exchange.bench.workspace.dataset.labels
    if ending == ".nrrd":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "labels.nrrd"
            write_nrrd(path, array, geometry, labels)
            content = path.read_bytes()
    else:
        content, ending = display_nifti(array.astype("uint8"), geometry), ".nii.gz"
    params = {"label_names": {name: k for k, name in enumerate(labels.foreground, start=1)}}
    limit = secrets.token_hex(16)
    head = (
        f'--{limit}\r\nContent-Disposition: form-data; name="params"\r\nContent-Type: application/json\r\n\r\n'
        f'{json.dumps(params)}\r\n--{limit}\r\nContent-Disposition: form-data; name="image"; '
        f'filename="{limit}{ending}"\r\nContent-Type: application/octet-stream\r\n\r\n'
    )
    body = head.encode() + content + f"\r\n--{limit}--\r\n".encode()
    return Response(body, media_type=f"multipart/form-data; boundary={limit}")


def describe(bench: Bench, case: str, drawn: bool) -> dict[str, Any]:
    labels, ending = bench.workspace.dataset.labels, bench.workspace.dataset.ending
    known = {
        "ext": ".nii.gz",
        "info": {"params": {"label_names": {name: k for k, name in enumerate(names(labels), 1)}}},
    }
    return {"image": {"ext": ending, "info": {"name": case}}, "labels": dict.fromkeys(TAGS, known) if drawn else {}}


def datastore_stats(bench: Bench) -> dict[str, Any]:
    found = bench.cases.progress()
    drawn = sum(1 for about in found.values() if any(about["voxels"]))
    tags = dict.fromkeys(TAGS, drawn)
    return {"total": len(found), "completed": drawn, "label_tags": tags, "train": tags}


def train_stats(state: dict[str, Any] | None) -> dict[str, Any]:
    """Progress as epochs out of 100, which clients display."""
    if state is None or state["kind"] != "train":
        return {}
    over = state["status"] not in ("running", "stopping")
    stats = {"epoch": round(100 * state["share"]), "total_epochs": 100, "start_ts": int(state["started"])}
    return {**stats, **({"total_time": 1} if over else {})}


def task(state: dict[str, Any] | None) -> dict[str, Any]:
    assert state is not None
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(state["started"])))
    said = state["message"] or f"{state['phase'] or state['status']} {round(100 * state.get('share', 0))} %"
    return {
        "id": state["id"],
        "status": _STATES[state["status"]],
        "model": MODEL,
        "start_ts": started,
        "details": [said],
        "result": {"message": state["message"]} if state["message"] else {},
    }

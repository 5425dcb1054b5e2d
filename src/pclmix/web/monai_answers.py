"""What MONAI Label's clients read of a dataset, a prediction and a training."""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from fastapi.responses import Response

from pclmix.io.nrrd import write_segmentation
from pclmix.web.bench import Bench
from pclmix.web.cases import display_nifti
from pclmix.web.exchange import Exchange
from pclmix.web.labelfiles import names

MODEL = "pclmix"
TAGS = ("original", "final")  #: both are the strokes as they are now: 3D Slicer opens a case with "original"
_STATES = {"running": "RUNNING", "stopping": "RUNNING", "finished": "DONE", "stopped": "CANCELED", "failed": "ERROR"}


def predicted(exchange: Exchange, case: str, ending: str) -> Response:
    """A prediction as a form of two parts, as clients expect it: params, and the label map as a file."""
    array, geometry = exchange.predict(case)
    labels = exchange.bench.workspace.dataset.labels
    if ending == ".nrrd":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "labels.nrrd"
            write_segmentation(path, array, geometry, labels)
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
    """Steps as a client shows epochs: so many of a hundred."""
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

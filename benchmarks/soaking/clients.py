"""What the clients do: draw, upload, look, train."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import shutil
import signal
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import nibabel as nib
import numpy as np

from pclmix.web.strokes import Run, paint
from soaking.ledger import Ledger, Map
from soaking.world import World, worker_runs

POOL = 12  #: names of uploaded cases; when all are taken, the cases are removed and the names used again
RUNS = 3  #: run folders kept, as a user who tidies up keeps them: each has 50 MB


def draw(world: World, chance: random.Random) -> None:
    """Open a case, draw a few strokes as the page does, undo one, restore a state."""
    ledger = world.ledgers[chance.choice(list(world.ledgers))]
    path = f"/api/cases/{ledger.case}/strokes"
    with world.turn():
        answer = world.call("GET", path, "strokes")
        if answer is None or answer.status_code != 200:
            return
        shape = tuple(map(int, answer.headers["x-shape"].split(",")))
        before = np.frombuffer(answer.content, np.uint8).reshape(shape).astype(np.int16) - 1
        version = answer.headers["x-version"]
        ledger.seen(version, before)
    undo: list[Run] = []
    for _ in range(chance.randint(1, 8)):
        time.sleep(chance.uniform(0.2, 1.2))
        kind = chance.random()
        with world.turn():
            if kind < 0.1:
                found = restore(world, ledger, version, before, chance)
                undo = []
            else:
                runs = undo if undo and kind < 0.25 else stroke(before, chance)
                what = "undo" if runs is undo else "strokes"
                undo = [(at, 1, int(before.flat[at])) for at, count, _ in runs for at in range(at, at + count)]
                after = before.copy()
                paint(after, runs, ledger.dataset.labels.count)
                body = {"version": version, "runs": runs, "what": what, "client": "soak"}
                found = save(world, ledger, path, "strokes", version, after, body)
        if found is None:
            return
        version, before = found


def stroke(array: Map, chance: random.Random) -> list[Run]:
    """A short line in one slice, three pixels wide, of a class that changes it."""
    depth, height, width = array.shape
    z, y, x = chance.randrange(depth), chance.randrange(height - 12), chance.randrange(width - 20)
    slope, length, value = chance.choice((0, 1)), chance.randint(4, 12), chance.randrange(4)
    starts = [(z * height + y + k) * width + x + slope * k for k in range(length)]
    if all((array.reshape(-1)[s : s + 3] == value).all() for s in starts):
        value = (value + 1) % 4
    return [(start, 3, value) for start in starts]


def restore(world: World, ledger: Ledger, version: str, before: Map, chance: random.Random) -> tuple[str, Map] | None:
    path = f"/api/cases/{ledger.case}/history"
    answer = world.call("GET", path, "history")
    if answer is None or answer.status_code != 200:
        return None
    entries = answer.json()[:40]
    if not entries:
        return version, before
    entry = chance.choice(entries)["id"]
    try:
        after = ledger.read(ledger.folder / f"{entry}.nii.gz")
    except FileNotFoundError:
        return None  # meanwhile older than the last 200
    if np.array_equal(after, before):
        return version, before
    body = {"version": version, "id": entry, "client": "soak"}
    return save(world, ledger, path, "history", version, after, body)


def save(
    world: World, ledger: Ledger, path: str, shown: str, version: str, after: Map, body: dict[str, Any]
) -> tuple[str, Map] | None:
    """Send a save; the new version and its map, or None if the case must be read again."""
    number = ledger.send(version, after)
    answer = world.call("POST", path, shown, json=body)
    if answer is None:
        return None  # stays pending: the kill came before or after the write
    if answer.status_code == 200:
        world.record.count("acknowledged saves")
        ledger.acknowledged(number, answer.json()["version"])
        return answer.json()["version"], after
    ledger.refused(number)
    if answer.status_code not in (409, 507):
        world.record.find(f"POST {shown}: {answer.status_code} {answer.text[:200]}")
    return None


def upload(world: World, chance: random.Random) -> None:
    """A good image, a zip of one with strokes, or something that must be refused."""
    name, values = f"up{chance.randrange(POOL)}", np.random.default_rng(chance.getrandbits(32))
    image = nib.Nifti1Image(values.integers(0, 400, (40, 48, 4)).astype(np.int16), np.diag([1.5, 1.5, 8, 1]))
    raw = nib_bytes(image)
    kind, good = chance.choice(("image", "image", "zip", "cut", "text", "png", "badzip", "name")), False
    if kind == "image":
        sent, called, good = raw, f"{name}.nii.gz", True
    elif kind == "zip":
        labels = nib.Nifti1Image(np.full((40, 48, 4), 4, np.uint8), image.affine)
        files = {f"imagesTr/{name}_0000.nii.gz": raw, f"labelsTr/{name}.nii.gz": nib_bytes(labels)}
        sent, called, good = zip_bytes(files), f"{name}.zip", True
    elif kind == "cut":
        sent, called = raw[: len(raw) // 2], f"bad{name}.nii.gz"
    elif kind == "text":
        sent, called = b"this is not an image", f"bad{name}.nii.gz"
    elif kind == "png":
        sent, called = b"\x89PNG\r\n\x1a\n" + raw[:500], f"bad{name}.png"
    elif kind == "badzip":
        sent, called = zip_bytes({"imagesTr/bad_0000.nii.gz": raw})[:-40], "bad.zip"
    else:
        sent, called = raw, "../../" + "x" * 300 + ".nii.gz"
    with world.turn():
        taken = name in world.uploads or name in world.doubtful
        answer = world.call("POST", "/api/import", f"import {kind}", params={"name": called}, content=sent)
        content = hashlib.sha256(raw).hexdigest()
        if answer is None:
            if good and not taken:
                world.doubtful[name] = content
        elif answer.status_code == 200 and good and not taken:
            world.uploads[name] = content
        elif answer.status_code == 200:
            world.record.find(f"an upload that should be refused was added: {kind} {called}")
        elif answer.status_code != 507 and good and not taken:
            world.record.find(f"a good upload was refused: {answer.status_code} {answer.text[:200]}")


def nib_bytes(image: nib.Nifti1Image) -> bytes:
    return gzip.compress(image.to_bytes(), 1)


def zip_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def look(world: World, chance: random.Random) -> None:
    """What the page reads, and downloads."""
    case = chance.choice(list(world.ledgers))
    plain = ["/api/dataset", "/api/progress", "/api/first", "/api/jobs", "/api/jobs/choices", "/"]
    parts = ["image/0", "thumbnail", "prediction", "unsure", "difference", "next", "history"]
    choices = [*plain, *(f"/api/cases/{case}/{part}" for part in parts), "zip", "zip", "events", "between"]
    path = chance.choice(choices)
    with world.turn():
        if path == "zip":
            path = f"/api/export/{chance.choice(('dataset', 'predictions'))}.zip"
            answer = world.call("GET", path)
            if answer is not None and answer.status_code == 200:
                broken = zipfile.ZipFile(io.BytesIO(answer.content)).testzip()
                if broken:
                    world.record.find(f"{path}: {broken} is damaged")
        elif path == "events":
            listen(world)
        elif path == "between":
            world.call("POST", f"/api/cases/{case}/between", "between", json={})
        else:
            world.call("GET", path, path.replace(case, "CASE"))


def listen(world: World) -> None:
    """Follow the events of the server for two seconds, as an open page does."""
    ends = time.monotonic() + 2
    with suppress(httpx.TransportError):  # a kill
        with httpx.stream("GET", f"{world.server.address}/api/events", timeout=20) as answer:
            for _ in answer.iter_lines():
                if time.monotonic() > ends:
                    break
        world.record.count(f"GET /api/events: {answer.status_code}")


def train(world: World, chance: random.Random) -> None:
    """Train and predict; now and then the worker is killed and the training resumed."""
    case = chance.choice(list(world.ledgers))
    job(world, "/api/jobs/train", {"recipe": "tiny", "then": [case]}, chance)
    state = jobs(world).get("job") or {}
    if state.get("resumable") and world.goes_on():
        job(world, "/api/jobs/resume", {"id": state["id"]}, chance)
    runs = jobs(world).get("runs")
    if runs and world.goes_on():
        job(world, "/api/jobs/predict", {"run": runs[0]["id"], "cases": list(world.ledgers)}, chance)
    pause = time.monotonic() + chance.uniform(5, 25)
    while time.monotonic() < pause and world.goes_on():
        time.sleep(0.5)
    with world.quiet():
        tidy(world)


def jobs(world: World) -> dict[str, Any]:
    with world.turn():
        answer = world.call("GET", "/api/jobs")
        return answer.json() if answer is not None and answer.status_code == 200 else {}


def job(world: World, path: str, body: dict[str, Any], chance: random.Random) -> None:
    """Start a job and follow it to its end; its worker may be killed or stopped on the way."""
    sent = time.monotonic()
    with world.turn():
        answer = world.call("POST", path, json=body)
    if answer is None or answer.status_code != 200:
        return
    name = answer.json()["id"]
    kill = time.monotonic() + chance.uniform(1, 20) if chance.random() < 0.35 else None
    stop = time.monotonic() + chance.uniform(5, 30) if kill is None and chance.random() < 0.15 else None
    killed = False
    while time.monotonic() < sent + 300:
        time.sleep(1)
        state = jobs(world).get("job")
        if state is None or state["id"] != name:
            continue  # the server is being started
        if state["status"] not in ("running", "stopping"):
            break
        if kill is not None and time.monotonic() > kill:
            pid = int((world.server.root / ".pclmix" / "jobs" / name / "pid").read_text())
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed = True
                world.record.count("kills of a worker")
            kill = None
        if stop is not None and time.monotonic() > stop:
            with world.turn():
                world.call("POST", "/api/jobs/stop", json={})
            stop = None
    else:
        world.record.find(f"job {name} has not ended after 300 s")
        return
    kind = path.rpartition("/")[2]
    world.record.count(f"job {kind}: {state['status']}{', worker killed' if killed else ''}")
    if state["status"] == "failed" and not killed:
        if world.last_full < sent:
            world.record.find(f"job {kind} failed: {state['message'][:300]}")
        else:
            world.record.count(f"job {kind}: failed on a full disk")


def tidy(world: World) -> None:
    """What a user removes now and then: uploaded cases, old runs. Not while a job runs."""
    root, internal = world.server.root, world.server.root / ".pclmix"
    if worker_runs(root) or world.full:
        return
    if len(world.uploads) >= POOL - 2:
        for name in world.uploads:
            for path in (root / "imagesTr" / f"{name}_0000.nii.gz", root / "labelsTr" / f"{name}.nii.gz"):
                path.unlink(missing_ok=True)
        world.uploads.clear()
    runs = sorted((internal / "runs").glob("[0-9]*")) if (internal / "runs").is_dir() else []
    for run in runs[:-RUNS]:
        shutil.rmtree(run)
        shutil.rmtree(internal / "predictions" / run.name, ignore_errors=True)


def repeat(world: World, action: Callable[[World, random.Random], None], pause: float, seed: str) -> None:
    chance = random.Random(seed)
    while world.goes_on():
        try:
            action(world, chance)
        except Exception:  # a client must not end unnoticed
            world.record.find(f"{action.__name__}: {traceback.format_exc(limit=-3)}")
            time.sleep(1)
        time.sleep(chance.uniform(0.5, 1.5) * pause)

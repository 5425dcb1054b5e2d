"""Failures: full disk, second server, killed server, malformed requests, stalled connections."""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from browsing import labels_of
from filelock import lock_descriptor
from uploading import listing, send

from pclmix.errors import PclmixError
from pclmix.io.volume import read_image, write_labels
from pclmix.web.serve import PatientProtocol, claimed, sweep
from pclmix.web.strokes import StrokeStore
from pclmix.web.workspace import Workspace


def save(page, version: str, runs: list[list[int]]):
    return page.client.post("/api/cases/case1/strokes", json={"version": version, "runs": runs})


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_keeps_the_history(page, monkeypatch):
    """Five states, 200 failed saves, one good one: all six states can be restored."""
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    states = [labels_of(page.root, "case1")]
    for k in range(5):
        version = save(page, version, [[k * 10, 5, k % 3]]).json()["version"]
        states.append(labels_of(page.root, "case1"))
    before = listing(page.root)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        for _ in range(200):
            answer = save(page, version, [[0, 1, 1]])
            assert answer.status_code == 507
            assert "full" in answer.json()["error"]
        assert send(page, "new.nii.gz", (page.root / "imagesTr" / "case1_0000.nii.gz").read_bytes()).status_code == 507
    assert listing(page.root) == before
    version = save(page, version, [[0, 1, 1]]).json()["version"]
    history = page.client.get("/api/cases/case1/history").json()
    assert len(history) == 6
    for entry, state in zip(history, reversed(states), strict=True):
        body = {"version": version, "id": entry["id"]}
        version = page.client.post("/api/cases/case1/history", json=body).json()["version"]
        assert np.array_equal(labels_of(page.root, "case1"), state)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_read_only_folder_names_the_folder_and_the_way_out(page, monkeypatch, number):
    def denied(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    before = listing(page.root)
    with monkeypatch.context() as context:
        context.setattr("tempfile.mkstemp", denied)
        context.setattr(os, "link", denied)
        answer = save(page, version, [[0, 1, 1]])
    assert answer.status_code == 507
    said = answer.json()["error"]
    assert str(page.root.resolve()) in said
    assert "writable" in said
    assert listing(page.root) == before
    assert save(page, version, [[0, 1, 1]]).status_code == 200


def test_jobs_of_a_read_only_dataset_are_shown(page, monkeypatch):
    job = page.root / ".pclmix" / "jobs" / "20200101-000000"
    job.mkdir(parents=True)
    (job / "request.json").write_text(
        json.dumps({"kind": "predict", "run": "20200101-000000", "cases": [], "started": 0})
    )
    (job / "outcome.json").write_text(json.dumps({"status": "finished"}))
    opened = os.open

    def denied(path, *rest, **more):
        if str(path).endswith("lock"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", denied)
    assert page.client.get("/api/jobs").json()["job"]["status"] == "finished"


def test_a_server_with_an_open_page_stops_without_a_traceback(dataset):
    process = subprocess.Popen(
        [sys.executable, "-m", "pclmix", "serve", str(dataset), "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 30) as page:
        page.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert page.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == ""


def test_history_survives_a_program_that_writes_in_place(page):
    """The history keeps the replaced file, which is never modified."""
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    first = labels_of(page.root, "case1")
    version = save(page, version, [[0, 5, 1]]).json()["version"]
    path = page.root / "labelsTr" / "case1.nii.gz"
    with path.open("r+b") as file:
        file.write(b"\0" * 40)
    (entry,) = StrokeStore(Workspace(page.root)).history("case1")
    kept = page.root / ".pclmix" / "history" / "case1" / f"{entry.id}.nii.gz"
    import nibabel as nib

    assert np.array_equal(np.asarray(nib.load(kept).dataobj).transpose(2, 1, 0), first)


def test_concurrent_readers_see_complete_files(page):
    """`pclmix train` may read during drawing: each label file read is one of the saved states."""
    dataset, saved = Workspace(page.root).dataset, set()
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    ended = threading.Event()

    def draw() -> None:
        token = version
        for k in range(60):
            token = save(page, token, [[0, 480, k % 3]]).json()["version"]
        ended.set()

    first = dataset.read_scribble("case1")[0].tobytes()
    thread = threading.Thread(target=draw)
    thread.start()
    while not ended.is_set():
        array = dataset.read_scribble("case1")[0]
        assert array.tobytes() == first or len(np.unique(array)) == 1
        saved.add(array.tobytes())
    thread.join()
    assert len(saved) > 1


def start(root: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "pclmix", "serve", str(root), "--no-browser", "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().removeprefix("workbench: ").strip()


def test_a_second_server_is_refused_with_the_address_of_the_first(dataset):
    first, address = start(dataset)
    try:
        second = subprocess.run(
            [sys.executable, "-m", "pclmix", "serve", str(dataset), "--no-browser", "--port", "0"],
            capture_output=True,
            text=True,
        )
        assert second.returncode == 2
        assert address in second.stderr.replace("\n", "")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        third, _ = start(dataset)  # a killed server holds nothing
        third.send_signal(signal.SIGINT)
        third.wait(20)
        assert not (dataset / ".pclmix" / "server.json").exists()
    finally:
        first.kill()


def test_released_dataset_can_be_claimed_again(dataset):
    with claimed(Workspace(dataset)) as claim:
        assert claim.held
        with pytest.raises(PclmixError, match="another workbench"), claimed(Workspace(dataset)):
            pass
    with claimed(Workspace(dataset)) as claim:
        assert claim.held


def test_leftovers_of_a_killed_server_are_removed(dataset):
    before = listing(dataset)
    left = ("labelsTr/.case1-ab3d_x9z.nii.gz", "imagesTr/.new_0000-q1w2e3r4.nii.gz", ".dataset-abcdefgh.json")
    (dataset / ".pclmix" / "incoming" / "tmp1").mkdir(parents=True)
    for name in (*left, ".pclmix/incoming/tmp1/upload"):
        (dataset / name).write_bytes(b"half")
    mine = dataset / "labelsTr" / ".my-notes.txt"
    mine.write_text("not a leftover")
    assert sweep(Workspace(dataset)) == 4
    assert listing(dataset) == before | {"labelsTr/.my-notes.txt"}


def test_leftovers_of_killed_jobs_are_removed_once_no_job_runs(dataset):
    left = ["runs/20260101-000000/.last-ab3d_x9z.ckpt", "predictions/20260101-000000/.case1-q1w2e3r4.nii.gz"]
    left += ["jobs/20260101-000000/.outcome-abcdefgh.json", "thumbnails/.case1-1-2-3-abcdefgh.png"]
    for name in left:
        path = dataset / ".pclmix" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half")
    workspace = Workspace(dataset)
    lock = os.open(workspace.internal("jobs", "lock"), os.O_RDWR | os.O_CREAT)
    assert lock_descriptor(lock, blocking=False)  # as a job holds it
    assert sweep(workspace) == 1  # the thumbnail
    os.close(lock)
    assert sweep(workspace) == 3
    assert not [path for path in dataset.rglob(".*-*") if path.is_file()]


def test_save_cut_off_by_a_kill_leaves_no_second_entry(dataset, monkeypatch):
    """Killed between the history's link and the new label file: the state would be in the history twice."""
    store = StrokeStore(Workspace(dataset))
    store.save("case1", store.read("case1").version, [(0, 5, 1)])
    before = store.read("case1")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    monkeypatch.setattr("pclmix.web.strokes.write_labels", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.save("case1", before.version, [(20, 5, 1)])
    monkeypatch.undo()
    assert len(store.history("case1")) == 2
    assert sweep(Workspace(dataset)) == 1
    assert len(store.history("case1")) == 1
    assert np.array_equal(store.read("case1").array, before.array)


def test_map_and_version_of_a_read_belong_together(dataset, monkeypatch):
    """A save between the look at the version and the reading of the file."""
    store, other = StrokeStore(Workspace(dataset)), StrokeStore(Workspace(dataset))
    read, saved = type(store.workspace.dataset).read_scribble, []

    def somebody_saves(self, case):
        if not saved:
            saved.append("")
            saved.append(other.save(case, other.read(case).version, [(0, 5, 1)]))
        return read(self, case)

    monkeypatch.setattr(type(store.workspace.dataset), "read_scribble", somebody_saves)
    found = store.read("case1")
    assert found.version == saved[1]
    assert (found.array.reshape(-1)[:5] == 1).all()


def test_concurrently_created_label_file_is_kept(dataset, monkeypatch):
    """`complete` does not overwrite strokes saved at the same time."""
    path = dataset / "labelsTr" / "case2.nii.gz"
    drawn = path.read_bytes()
    path.unlink()
    workspace = Workspace(dataset)
    read = type(workspace.dataset).read_image

    def somebody_saves(self, case):
        path.write_bytes(drawn)
        return read(self, case)

    monkeypatch.setattr(type(workspace.dataset), "read_image", somebody_saves)
    workspace.complete()
    assert path.read_bytes() == drawn


BODIES = {
    "nan": b'{"minutes": NaN}',
    "infinity": b'{"minutes": 1e400}',
    "surrogate": b'{"recipe": "\\ud800"}',
    "surrogate case": b'{"then": ["\\udfff"]}',
    "latin-1": b'{"recipe": "\xe9"}',
    "large integer": b'{"minutes": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 100_000,
    "array": b"[]",
    "null": b"null",
    "nothing": b"",
    "wrong type": b'{"then": "case1", "minutes": []}',
    "utf-16": '{"recipe": "fast"}'.encode("utf-16-le")[1:],
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("path", ["jobs/train", "jobs/predict", "cases/case1/strokes", "cases/case1/history"])
def test_malformed_bodies_are_refused(page, path, body):
    answer = page.client.post(f"/api/{path}", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert isinstance(answer.json()["error"], str)
    assert page.client.get("/api/jobs").json()["job"] is None


@pytest.mark.parametrize(
    "runs",
    ["[[0, 1, 9223372036854775808]]", "[[18446744073709551616, 1, 1]]", "[[0, 1e400, 1]]", "[[0, NaN, 1]]", "[[0, 1]]"],
)
def test_numbers_past_64_bits_change_nothing(page, runs):
    before = labels_of(page.root, "case1")
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    body = f'{{"version": "{version}", "runs": {runs}}}'
    answer = page.client.post("/api/cases/case1/strokes", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert np.array_equal(labels_of(page.root, "case1"), before)


def test_errors_do_not_echo_the_request(page):
    body = {"version": "x", "runs": [["SECRET" * 10, 1, 1]] * 50_000}
    answer = page.client.post("/api/cases/case1/strokes", json=body)
    assert answer.status_code == 422
    assert len(answer.content) < 1000
    assert b"SECRET" not in answer.content


@pytest.mark.parametrize("recipe", ["{}/mine.yaml", "../mine.yaml", "mine", "", "fast.yaml"])
def test_recipe_paths_are_refused(page, tmp_path, recipe):
    (tmp_path / "mine.yaml").write_text("password: hunter2")
    answer = page.client.post("/api/jobs/train", json={"recipe": recipe.format(tmp_path)})
    assert answer.status_code in (400, 422)
    assert "recipe" in answer.json()["error"]
    assert "hunter2" not in answer.text


def test_an_unknown_method_is_refused(page):
    answer = page.client.post("/api/jobs/train", json={"method": "nothing", "recipe": "tiny"})
    assert answer.status_code == 400
    assert "method" in answer.json()["error"]
    assert page.client.get("/api/jobs").json()["job"] is None


def test_a_file_whose_name_is_not_utf8_does_not_hide_the_others(serve, dataset):
    image = dataset / "imagesTr" / "case1_0000.nii.gz"
    Path(os.fsdecode(os.fsencode(dataset) + b"/imagesTr/caf\xe9_0000.nii.gz")).write_bytes(image.read_bytes())
    page = serve(dataset)
    for path in ("dataset", "progress", "first?case=none"):
        assert page.client.get(f"/api/{path}").status_code == 200
    assert {"case1", "case2"} < {case["name"] for case in page.client.get("/api/dataset").json()["cases"]}


@pytest.mark.parametrize("name", ["心臓", 'a"b\r\nx: y', "\ud800", "été"])
def test_download_of_datasets_with_any_name(serve, dataset, name):
    about = json.loads((dataset / "dataset.json").read_text())
    (dataset / "dataset.json").write_text(json.dumps({**about, "name": name}))
    page = serve(dataset)
    answer = page.client.get("/api/export/dataset.zip")
    assert answer.content[:2] == b"PK"
    assert answer.headers["content-disposition"].isascii()
    assert page.client.get("/api/dataset").status_code == 200


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        (b"", {"head_seconds": 0.5}),
        (b"GET / HTTP/1.1\r\nHost: loc", {"head_seconds": 0.5}),
        (b"POST /api/jobs/train HTTP/1.1\r\nHost: localhost\r\nx-pclmix: 1\r\ncontent-length: 10\r\n\r\n{", {}),
    ],
    ids=["silent", "half a header", "half a body"],
)
def test_stalled_connections_are_closed(page, monkeypatch, sent, limits):
    for key, value in {"every": 0.1, "stall_seconds": 0.5, **limits}.items():
        monkeypatch.setattr(PatientProtocol, key, value)
    host, port = page.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        begun = time.monotonic()
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
        assert time.monotonic() - begun < 5


def test_request_that_waits_in_a_busy_server_is_answered(page, monkeypatch):
    """The server is held up between looking for input and looking at the clock; meanwhile a request arrives."""
    for key, value in {"every": 0.1, "head_seconds": 0.5}.items():
        monkeypatch.setattr(PatientProtocol, key, value)
    select, held, asked = selectors.DefaultSelector.select, threading.Event(), threading.Event()

    def slow(self, timeout=None):
        found = select(self, timeout)
        if held.is_set() and not found:
            held.clear()
            asked.wait(10)
            time.sleep(1)
        return found

    monkeypatch.setattr(selectors.DefaultSelector, "select", slow)
    host, port = page.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        time.sleep(0.2)
        held.set()
        while held.is_set():
            time.sleep(0.01)
        connection.sendall(f"GET /api/dataset HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        asked.set()
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_slow_but_steady_upload_is_accepted(page, monkeypatch):
    monkeypatch.setattr(PatientProtocol, "every", 0.1)
    monkeypatch.setattr(PatientProtocol, "head_seconds", 0.3)
    content = (page.root / "imagesTr" / "case1_0000.nii.gz").read_bytes()

    def drops():
        for at in range(0, len(content), 100):
            time.sleep(0.1)
            yield content[at : at + 100]

    answer = page.client.post("/api/import", params={"name": "slow.nii.gz"}, content=drops())
    assert answer.json()["cases"] == ["slow"]


def test_refused_request_with_an_invalid_body_is_answered_once(page, caplog):
    """The header is refused by the application, the body by the server, both before the connection is closed."""
    host, port = page.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /api/jobs/train HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"
        )
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 400")
    assert page.client.get("/api/dataset").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_leaves_in_the_middle_of_an_upload(page, caplog):
    """The server prints no traceback, keeps nothing, and goes on."""
    before = listing(page.root)
    host, port = page.url.removeprefix("http://").split(":")
    head = "POST /api/import?name=a.nii.gz HTTP/1.1\r\nHost: localhost\r\nx-pclmix: 1\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + b"\x1f\x8b")
        incoming = page.root / ".pclmix" / "incoming"
        while not (incoming.is_dir() and any(incoming.iterdir())):
            time.sleep(0.01)
    while any(incoming.iterdir()):
        time.sleep(0.01)
    assert page.client.get("/api/dataset").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]
    assert listing(page.root) == before


def test_an_upload_of_another_ending_is_refused_before_decoding(page, monkeypatch):
    monkeypatch.setattr("pclmix.web.uploads.read_channels", None)
    answer = send(page, "a.png", b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("a.png: ")
    assert ".nii.gz" in answer.json()["error"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("outcome.json", b"[]"),
        ("outcome.json", b'{"done": "x", "cases": 3}'),
        ("outcome.json", b"\xff"),
        ("run.json", b'"finished"'),
        ("run.json", b'{"step": [], "seconds": null}'),
        ("config.yaml", b"\xff: &a [*a]"),
        ("config.yaml", b"engine: {seconds: x}"),
        ("metrics.jsonl", b'[]\n{"loss": 1}\n{"step": "x"}\n\xff'),
        ("figures.json", b"[]"),
        ("figures.json", b'{"time": "x"}'),
    ],
)
def test_damaged_files_of_jobs_do_not_stop_the_page(page, name, content):
    """A dataset folder may come from somebody else."""
    job, case = "20260101-000000", "case1"
    places = {"outcome.json": "jobs", "figures.json": "predictions"}
    for folder in ("jobs", "runs", "predictions"):
        (page.root / ".pclmix" / folder / job).mkdir(parents=True)
    request = {"kind": "train", "method": "pce", "recipe": "tiny", "run": job, "started": 1.7e9}
    (page.root / ".pclmix" / "jobs" / job / "request.json").write_text(json.dumps(request))
    (page.root / ".pclmix" / "runs" / job / "last.ckpt").write_bytes(b"")
    target = page.root / ".pclmix" / places.get(name, "runs") / job / name
    target.with_name(f"{case}.json" if name == "figures.json" else name).write_bytes(content)
    for path in ("jobs", "dataset", "progress"):
        assert page.client.get(f"/api/{path}").status_code == 200
    job_state = page.client.get("/api/jobs").json()["job"]
    assert (job_state["status"], job_state["step"], job_state["cases"]) == ("failed", 0, [])


def test_a_damaged_request_of_a_job_is_named(page):
    job = page.root / ".pclmix" / "jobs" / "20260101-000000"
    job.mkdir(parents=True)
    (job / "request.json").write_text('{"kind": "train", "run": "../..", "started": 1}')
    answer = page.client.get("/api/jobs")
    assert answer.status_code == 400
    assert "request.json is damaged" in answer.json()["error"]


@pytest.mark.parametrize("damage", ["archive", "types", "labels", "missing"])
def test_a_damaged_prediction_is_named(page, damage):
    folder = page.root / ".pclmix" / "predictions" / "20260101-000000"
    folder.mkdir(parents=True)
    figures = {"certainty": 0.5, "expected_dice": 0.5, "agreement": None, "unsure": [0.5], "time": 1.7e9}
    (folder / "case1.json").write_text(json.dumps(figures))
    image = read_image(page.root / "imagesTr" / "case1_0000.nii.gz")
    labels = np.full(image.geometry.shape, 9 if damage == "labels" else 1, np.uint8)
    write_labels(folder / "case1.nii.gz", labels, image.geometry)
    kind = np.float64 if damage == "types" else np.uint8
    np.savez(folder / "case1.npz", unsure=labels.astype(kind), second=labels)
    if damage == "archive":
        (folder / "case1.npz").write_bytes(b"PK\3\4")
    if damage == "missing":
        (folder / "case1.npz").unlink()
    assert page.client.get("/api/cases/case1/next").status_code == 400


def test_save_cut_off_before_the_oldest_entry_is_removed(dataset, monkeypatch):
    monkeypatch.setattr("pclmix.web.strokes.KEPT", 3)
    store = StrokeStore(Workspace(dataset))
    for start in range(3):
        store.save("case1", store.read("case1").version, [(start, 1, 1)])
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.save("case1", store.read("case1").version, [(3, 1, 1)])
    monkeypatch.undo()
    monkeypatch.setattr("pclmix.web.strokes.KEPT", 3)
    numbers = [entry.number for entry in store.history("case1")]
    assert len(numbers) == 4
    assert sweep(Workspace(dataset)) == 1
    assert [entry.number for entry in store.history("case1")] == numbers[:3]

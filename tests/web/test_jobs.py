"""Jobs: one at a time, state on disk only, stop and resume; predictions and suggestions."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from pclmix.data.dataset import Dataset
from pclmix.inference.uncertainty import Examined, Quality
from pclmix.io.files import read_json, write_json
from pclmix.io.volume import write_labels
from pclmix.synth.phantom import make_phantom
from pclmix.web.assist import where_next
from pclmix.web.jobs import Jobs
from pclmix.web.strokes import StrokeStore
from pclmix.web.worker import start_from
from pclmix.web.workspace import PredictionStore, Workspace


def wait(jobs: Jobs, *wanted: str, seconds: float = 240) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = jobs.state()
        assert state is not None
        if state["status"] in wanted:
            return state
        assert state["status"] in ("running", "stopping"), state
        time.sleep(0.1)
    raise AssertionError(f"still {state}")


@pytest.fixture
def phantom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    make_phantom(tmp_path / "phantom", 1)
    return tmp_path / "phantom"


def test_training_is_planned_from_the_data(phantom, serve):
    page = serve(phantom)
    assert page.client.get("/api/jobs/choices").json()["recipes"][0] == "plan"
    assert page.client.post("/api/jobs/train", json={"method": "pce", "minutes": 0.1}).status_code == 200
    wait(Jobs(Workspace(phantom)), "finished")
    (run,) = page.client.get("/api/jobs").json()["runs"]
    assert run["recipe"] == "plan"
    assert (Jobs(Workspace(phantom)).run_folder(run["id"]) / "plan.yaml").is_file()


def test_train_stop_resume_predict(phantom, serve):
    """Each check uses a new `Jobs`, as after a restart of the server."""
    page = serve(phantom)
    case = "phantom001_frame01"
    body = {"recipe": "tiny", "method": "pce", "minutes": 60, "then": [case]}
    assert page.client.post("/api/jobs/train", json=body).status_code == 200
    again = page.client.post("/api/jobs/train", json=body)
    assert again.status_code == 409
    assert "running" in again.json()["error"]
    while not Jobs(Workspace(phantom)).state()["step"]:
        assert Jobs(Workspace(phantom)).state()["status"] == "running"
        time.sleep(0.1)
    running = page.client.get("/api/jobs").json()["job"]
    assert 0 < running["left"] < 3600
    assert running["curve"][0][0] == 1
    page.client.post("/api/jobs/stop", json={})
    stopped = wait(Jobs(Workspace(phantom)), "stopped")
    assert stopped["resumable"]
    first = page.client.get("/api/jobs").json()["job"]["step"]
    assert page.client.post("/api/jobs/resume", json={"id": stopped["id"]}).status_code == 200
    while Jobs(Workspace(phantom)).state()["step"] <= first:
        assert Jobs(Workspace(phantom)).state()["status"] == "running"
        time.sleep(0.1)
    page.client.post("/api/jobs/stop", json={})
    wait(Jobs(Workspace(phantom)), "stopped")
    run = page.client.get("/api/jobs").json()["runs"][0]["id"]
    assert page.client.post("/api/jobs/predict", json={"run": run, "cases": [case]}).status_code == 200
    wait(Jobs(Workspace(phantom)), "finished")
    known = page.client.get("/api/dataset").json()["cases"][0]["predictions"]
    assert len(known) == 1
    assert 0 <= known[0]["certainty"] <= 1
    assert 0 <= known[0]["expected_dice"] <= 1
    for kind in ("prediction", "unsure"):
        assert page.client.get(f"/api/cases/{case}/{kind}").status_code == 200
    assert page.client.get(f"/api/cases/{case}/difference").status_code == 404
    assert page.client.get(f"/api/cases/{case}/next").status_code == 200
    assert page.client.get("/api/export/predictions.zip").content[:2] == b"PK"


def test_training_again_starts_from_the_last_model(phantom, serve):
    """Of the same method and recipe, if it has finished, and only if the page asks for it."""
    page = serve(phantom)
    body = {"recipe": "tiny", "method": "pce"}

    def train(**more: Any) -> tuple[str, dict[str, Any]]:
        job = page.client.post("/api/jobs/train", json=body | more).raise_for_status().json()["id"]
        return job, Jobs(Workspace(phantom)).request(job)

    first, request = train()
    assert request["start"] is None
    wait(Jobs(Workspace(phantom)), "finished")
    jobs = Jobs(Workspace(phantom))
    assert [jobs.last_model("pce", recipe) for recipe in ("tiny", "plan")] == [first, None]
    assert jobs.last_model("pclmix", "tiny") is None
    second, request = train()
    assert request["start"] == page.client.get("/api/jobs").json()["job"]["start"] == first
    wait(Jobs(Workspace(phantom)), "finished")
    assert read_json(jobs.run_folder(second) / "run.json")["start_from"] == str(jobs.run_folder(first))
    begun = [read_losses(jobs.run_folder(run))[0] for run in (first, second)]
    assert begun[1] < begun[0]
    assert page.client.post("/api/jobs/train", json={**body, "warm": "no"}).status_code == 422
    third, request = train(warm=False)
    assert request["start"] is None
    page.client.post("/api/jobs/stop", json={})
    wait(jobs, "stopped", "finished")
    assert jobs.last_model("pce", "tiny") in (second, third)


def test_training_starts_from_random_weights_if_the_last_model_does_not_fit(page, tiny_run, capsys):
    """Its images had another number of channels, or it was deleted."""
    workspace = Workspace(page.root)
    shutil.copytree(tiny_run, workspace.internal("runs", "20200101-000000"))
    assert start_from(workspace, "20200101-000000") == workspace.internal("runs", "20200101-000000")
    about = read_json(page.root / "dataset.json")
    write_json(page.root / "dataset.json", {**about, "channel_names": {"0": "T1", "1": "T2"}})
    assert start_from(Workspace(page.root), "20200101-000000") is None
    assert "channel" in capsys.readouterr().err
    assert start_from(workspace, "20200101-000001") is None


def read_losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_failed_job_reports_the_reason(page):
    """Class LV has no stroke in this dataset: the page gets the error of training."""
    page.client.post("/api/jobs/train", json={"recipe": "tiny", "method": "pce"})
    state = wait(Jobs(Workspace(page.root)), "failed")
    assert "no scribble of class LV" in state["message"]


def test_a_job_on_a_full_disk_says_so(page, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    full = "import errno, os\ndef replace(*paths, **more):\n    raise OSError(errno.ENOSPC, 'No space left')\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(full + "os.replace = replace\n")
    with monkeypatch.context() as context:
        context.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
        page.client.post("/api/jobs/train", json={"recipe": "tiny", "method": "pce"})
    while (state := page.client.get("/api/jobs").json()["job"])["status"] == "running":
        time.sleep(0.1)
    assert state["status"] == "failed"
    assert "disk is full" in state["message"]


def test_cases_without_strokes_are_left_out(page):
    """Only annotated cases are trained on; without any, the request is refused at once."""
    dataset = Dataset.open(page.root)
    geometry = dataset.read_image("case1").geometry
    blank = np.full(geometry.shape, dataset.labels.ignore)
    write_labels(dataset.scribble_path("case1"), blank, geometry)
    job = page.client.post("/api/jobs/train", json={"recipe": "tiny", "method": "pce"}).json()["id"]
    assert Jobs(Workspace(page.root)).request(job)["cases"] == ["case2"]
    state = wait(Jobs(Workspace(page.root)), "failed")
    assert "no scribble of class LV" in state["message"]
    write_labels(dataset.scribble_path("case2"), blank, geometry)
    answer = page.client.post("/api/jobs/train", json={"recipe": "tiny", "method": "pce"})
    assert answer.status_code == 400
    assert "no strokes" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("train", {"recipe": "../../etc/passwd"}, 400),
        ("train", {"recipe": "/tmp/x.yaml"}, 400),
        ("train", {"minutes": -1}, 422),
        ("train", {"minutes": True}, 422),
        ("predict", {"run": "../x", "cases": ["case1"]}, 404),
        ("predict", {"run": "20200101-000000", "cases": ["case1"]}, 404),
        ("resume", {"id": "../../x"}, 404),
        ("stop", {}, 400),
    ],
)
def test_invalid_job_requests_are_refused(page, path, body, status):
    assert page.client.post(f"/api/jobs/{path}", json=body).status_code == status
    assert page.client.get("/api/jobs").json() == {"job": None, "runs": []}


def test_difference_of_two_predictions(page):
    """The difference compares the newest prediction with the one before, on the grid of the image."""
    workspace = Workspace(page.root)
    book, strokes = PredictionStore(workspace), StrokeStore(workspace).read("case1")
    before, after = np.zeros((4, 12, 10), np.uint8), np.zeros((4, 12, 10), np.uint8)
    after[2, 3, 4] = 1
    for run, labels in (("20200101-000000", before), ("20200101-000001", after)):
        found = Examined(
            labels, np.zeros(labels.shape, np.float32), labels, Quality(1.0, (0.5,), (0.0,) * 4, (0.0,) * 4)
        )
        book.write(run, "case1", found, strokes.geometry, workspace.dataset.labels, strokes.array)
    answer = page.client.get("/api/cases/case1/difference").content
    image = nib.Nifti1Image.from_bytes(gzip.decompress(answer))
    assert np.argwhere(np.asarray(image.dataobj)).tolist() == [[4, 3, 2]]
    assert np.allclose(image.affine, nib.load(page.root / "imagesTr" / "case1_0000.nii.gz").affine)
    known = page.client.get("/api/dataset").json()["cases"][0]["predictions"]
    assert [p["run"] for p in known] == ["20200101-000001", "20200101-000000"]
    drawn = strokes.array >= 0
    assert known[0]["agreement"] == pytest.approx(float((after[drawn] == strokes.array[drawn]).mean()))


def test_where_next_prefers_uncertain_places_without_strokes():
    unsure = np.zeros((3, 80, 80), np.uint8)
    unsure[1, 20:26, 20:26] = 255
    unsure[2, 50:56, 60:66] = 200
    labels, second = np.zeros_like(unsure), np.ones_like(unsure)
    strokes = np.full(unsure.shape, -1, np.int16)
    places = where_next(unsure, labels, second, strokes)
    assert [p["z"] for p in places] == [1, 2]
    assert abs(places[0]["y"] - 22.5) <= 1
    assert abs(places[1]["x"] - 62.5) <= 1
    assert places[0]["classes"] == [0, 1]
    strokes[1, 18:28, 18:28] = 1
    assert [p["z"] for p in where_next(unsure, labels, second, strokes)] == [2]


def test_job_events(page):
    with page.client.stream("GET", "/api/events") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = events.iter_lines()
        version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
        body = {"version": version, "runs": [[0, 1, 1]], "client": "me"}
        assert any("event: job" in line for line in lines)
        page.client.post("/api/cases/case1/strokes", json=body)
        for line in lines:
            if line == "event: strokes":
                assert '"client": "me"' in next(lines)
                break

"""The MONAI Label interface, tested with MONAI Label's own client on a non-RAS grid."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from browsing import labels_of, predict_by_hand
from uploading import listing

from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.io.volume import write_labels
from pclmix.labels import IGNORE, Labels
from pclmix.synth.phantom import make_phantom
from pclmix.web.labelfiles import decode, encode, names
from pclmix.web.security import Rules
from pclmix.web.serve import create_app

LABELS = Labels(("background", "RV", "LV"), 3)
INFO = [{"name": name, "idx": k} for k, name in enumerate(("RV", "LV", "background"), start=1)]


@pytest.fixture
def monai(serve, dataset) -> Any:
    return serve(dataset, Rules(monailabel=True))


def client_of(page: Any, folder: Path, who: str = "me") -> Any:
    """The client of MONAI Label, which needs Python below 3.13; installed without its dependencies."""
    reason = "MONAI Label's client is not installed: pip install --no-deps monailabel, and requests"
    module = pytest.importorskip("monailabel.client", reason=reason)
    folder.mkdir(exist_ok=True)
    return module.MONAILabelClient(page.url, tmpdir=str(folder), client_id=who)


def refused(status: int, call: Any, *arguments: Any) -> None:
    """The status in the exception raised by the client."""
    from monailabel.client.client import MONAILabelClientException

    with pytest.raises(MONAILabelClientException) as error:
        call(*arguments)
    assert f"Status: {status}" in error.value.msg


def upload(page: Any, values: np.ndarray, affine: np.ndarray, folder: Path, **params: Any) -> httpx.Response:
    """Send a label map (Z, H, W) as a client does."""
    path = folder / "label.nii.gz"
    nib.save(nib.Nifti1Image(values.transpose(2, 1, 0).astype(np.uint8), affine), path)
    return send(page, path, **params)


def send(page: Any, path: Path, **params: Any) -> httpx.Response:
    files, data = {"label": (str(path), path.read_bytes())}, {"params": json.dumps(params)}
    return httpx.put(f"{page.url}/datastore/label", params={"image": "case1"}, files=files, data=data)


def affine_of(page: Any) -> np.ndarray:
    return nib.load(page.root / "imagesTr" / "case1_0000.nii.gz").affine


def test_session_with_the_monai_label_client(tmp_path, serve, monkeypatch):
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "phantom"
    make_phantom(root, 1)
    turned = np.array([[0, -1.5, 0, 40], [-1.25, 0, 0, 30], [0, 0, -8, 20], [0, 0, 0, 1]], float)
    for path in sorted(root.glob("*Tr/*.nii.gz")):  # x to posterior, y to the left, z downwards
        nib.save(nib.Nifti1Image(np.asarray(nib.load(path).dataobj), turned), path)
    dataset = Dataset.open(root)
    blank = np.full(dataset.read_scribble(dataset.cases[0])[0].shape, dataset.labels.ignore)
    strokes = {case: dataset.read_scribble(case) for case in dataset.cases}
    write_labels(dataset.scribble_path(dataset.cases[0]), blank, strokes[dataset.cases[0]][1])
    page = serve(root, Rules(monailabel=True))
    client = client_of(page, tmp_path / "client")
    assert client.auth_enabled() is False

    info = client.info()
    assert info["labels"] == ["RV", "Myo", "LV", "Background"]
    assert (info["models"], list(info["trainers"])) == ({}, ["pclmix"])
    assert info["datastore"]["completed"] == len(dataset.cases) - 1
    sample = client.next_sample("where_next", {})
    case = sample["id"]
    assert case == dataset.cases[0]  # the one without a stroke
    image = page.client.get("/datastore/image", params={"image": case})
    assert image.content == (root / "imagesTr" / f"{case}_0000.nii.gz").read_bytes()

    mine = np.where(strokes[case][0] >= 0, strokes[case][0], 0)
    values = np.where(strokes[case][0] == IGNORE, 0, np.where(mine == 0, 4, mine)).astype(np.uint8)
    sent = tmp_path / "sent.nii.gz"
    nib.save(nib.Nifti1Image(values.transpose(2, 1, 0), turned), sent)
    labelled = [{"name": name, "idx": k} for k, name in enumerate(info["labels"], start=1)]
    assert client.save_label(case, str(sent), params={"label_info": labelled})["image"] == case
    assert np.array_equal(dataset.read_scribble(case)[0], strokes[case][0])
    objects = client.datastore()["objects"]
    assert objects[case]["labels"]["original"]["info"]["params"]["label_names"]["Background"] == 4
    got = nib.load(client.download_label(case, "original"))
    assert np.array_equal(np.asarray(got.dataobj), values.transpose(2, 1, 0))
    assert np.allclose(got.affine, turned)

    assert not client.train_status(check_if_running=True)
    started = client.train_start("pclmix", {"minutes": 0, "method": ["pce", "pclmix"], "recipe": ["tiny"]})
    assert started["status"] == "RUNNING"
    assert client.train_status(check_if_running=True)
    refused(429, client.train_start, "pclmix", {"method": "pce", "recipe": "tiny"})
    end = time.monotonic() + 240
    while client.train_status()["status"] == "RUNNING":
        assert time.monotonic() < end
        time.sleep(0.3)
    assert client.train_status()["status"] == "DONE"
    assert client.info()["models"]["pclmix"]["labels"] == ["RV", "Myo", "LV"]

    before = listing(root)
    for ending in (".nrrd", ".nii.gz"):
        file, params = client.infer("pclmix", case, {"result_extension": ending, "result_dtype": "uint8"})
        assert params["label_names"] == {"RV": 1, "Myo": 2, "LV": 3}
        assert file.endswith(ending)
        if ending == ".nii.gz":
            predicted = nib.load(file)
            assert np.allclose(predicted.affine, turned)
            labels = np.asarray(predicted.dataobj)
        else:
            import nrrd

            labels_nrrd, header = nrrd.read(file)
            flip = np.diag([-1.0, -1.0, 1.0])
            assert np.allclose(flip @ np.array(header["space directions"]).T, turned[:3, :3], atol=1e-4)
            assert np.allclose(flip @ header["space origin"], turned[:3, 3], atol=1e-4)
    assert np.array_equal(labels, labels_nrrd)
    assert set(np.unique(labels)) <= {0, 1, 2, 3}
    assert listing(root) == before  # a prediction asked for like this changes nothing


def test_stop_ends_a_training(monai, tmp_path):
    client = client_of(monai, tmp_path / "client")
    refused(400, client.train_stop)  # none is running
    client.train_start("pclmix", {"minutes": 60, "method": "pce", "recipe": "tiny"})
    stopped = client.train_stop()
    assert stopped["details"]
    end = time.monotonic() + 60
    while client.train_status(check_if_running=True):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_dense_masks_round_trip(monai, tmp_path):
    values = np.random.default_rng(0).integers(0, 3, (4, 12, 10))
    assert upload(monai, values, affine_of(monai), tmp_path, kind="mask", label_info=INFO[:2]).status_code == 200
    assert np.array_equal(labels_of(monai.root, "case1"), values)
    client = client_of(monai, tmp_path / "client")
    got = np.asarray(nib.load(client.download_label("case1", "final")).dataobj).transpose(2, 1, 0)
    assert np.array_equal(got, values)


@pytest.mark.parametrize("turn", ["RAS", "LPS", "SAR", "PIL"])
def test_permuted_axes_are_reordered(monai, tmp_path, turn):
    """Some programs reorder axes on export: voxels are matched by position."""
    values = np.zeros((4, 12, 10), np.uint8)
    values[1, 2, 3], values[2, 10, 7], values[3, 0, 0] = 1, 2, 3
    image = nib.Nifti1Image(values.transpose(2, 1, 0), affine_of(monai))
    wanted = nib.orientations.axcodes2ornt(tuple(turn))
    other = image.as_reoriented(nib.orientations.ornt_transform(nib.io_orientation(image.affine), wanted))
    assert other.shape != image.shape or not np.allclose(other.affine, image.affine)
    before = labels_of(monai.root, "case1")
    nib.save(other, tmp_path / "label.nii.gz")
    assert send(monai, tmp_path / "label.nii.gz", label_info=INFO).status_code == 200
    after = labels_of(monai.root, "case1")
    assert (after[1, 2, 3], after[2, 10, 7], after[3, 0, 0]) == (1, 2, 0)
    assert (after != before).sum() <= 3


@pytest.mark.parametrize(
    "change",
    [
        lambda affine: affine @ np.diag([1, 1, 1.2, 1]),
        lambda affine: affine + np.eye(4)[:, 3:] @ np.array([[0, 0, 0, 0]]) + np.outer([4, 0, 0, 0], [0, 0, 0, 1]),
        lambda affine: affine @ np.array([[0.9, 0.4, 0, 0], [-0.4, 0.9, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
    ],
    ids=["other spacing", "moved", "rotated"],
)
def test_a_label_on_another_grid_is_refused(monai, tmp_path, change):
    before = labels_of(monai.root, "case1")
    answer = upload(monai, np.ones((4, 12, 10)), change(affine_of(monai)), tmp_path, label_info=INFO)
    assert answer.status_code == 400
    assert "grid" in answer.json()["error"]
    assert upload(monai, np.ones((4, 12, 11)), affine_of(monai), tmp_path).status_code == 400
    assert np.array_equal(labels_of(monai.root, "case1"), before)


def test_page_and_client_edits_are_merged(monai, tmp_path):
    """Both edit the same case: strokes of both are kept, and erased ones stay erased."""
    client = client_of(monai, tmp_path / "client")
    version = monai.client.get("/api/cases/case1/strokes").headers["x-version"]
    first = monai.client.post("/api/cases/case1/strokes", json={"version": version, "runs": [[0, 480, -1], [0, 9, 1]]})
    got = nib.load(client.download_label("case1", "original"))  # the viewer sees nine pixels
    values = np.asarray(got.dataobj).transpose(2, 1, 0).copy()
    assert (values == 1).sum() == 9
    runs = [[100, 5, 2], [3, 1, -1]]  # meanwhile the page draws five others and erases one of the nine
    monai.client.post("/api/cases/case1/strokes", json={"version": first.json()["version"], "runs": runs})
    values.reshape(-1)[0], values.reshape(-1)[200:204] = 0, 3  # the viewer erases one and draws background
    assert upload(monai, values, got.affine, tmp_path, label_info=INFO).status_code == 200
    flat = labels_of(monai.root, "case1").reshape(-1)
    assert flat[:10].tolist() == [3, 1, 1, 3, 1, 1, 1, 1, 1, 3]
    assert flat[100:105].tolist() == [2] * 5
    assert flat[200:204].tolist() == [0] * 4
    assert monai.client.get("/api/cases/case1/history").json()[0]["what"] == "label"
    again = upload(monai, values, got.affine, tmp_path, label_info=INFO)  # the same once more changes nothing
    assert again.json()["version"] == monai.client.get("/api/cases/case1/strokes").headers["x-version"]
    assert np.array_equal(labels_of(monai.root, "case1").reshape(-1), flat)


def test_where_next_is_the_least_certain_case(monai, tmp_path):
    client = client_of(monai, tmp_path / "client")
    doubt = np.zeros((4, 12, 10))
    for case, unsure in (("case1", 0.1), ("case2", 0.9)):
        predict_by_hand(monai.root, case, np.ones(doubt.shape), doubt + unsure)
    path = next(monai.root.glob(".pclmix/predictions/*/case2.json"))
    path.write_text(path.read_text().replace('"certainty": 0.5', '"certainty": 0.2'))
    assert client.next_sample("where_next", {})["id"] == "case2"
    version = monai.client.get("/api/cases/case2/strokes").headers["x-version"]
    monai.client.post("/api/cases/case2/strokes", json={"version": version, "runs": [[0, 1, 1]]})
    assert client.next_sample("where_next", {})["id"] == "case1"
    refused(404, client.next_sample, "nothing", {})


def test_values_and_names():
    strokes = np.array([[[0, 1, 2, IGNORE]]], np.int16)
    assert encode(strokes, LABELS).ravel().tolist() == [3, 1, 2, 0]
    named = [(name, k) for k, name in enumerate(names(LABELS), start=1)]
    assert np.array_equal(decode(encode(strokes, LABELS), LABELS, named, False), strokes)
    dense = np.array([[[0, 1, 2, 2]]], np.int16)
    assert np.array_equal(decode(encode(dense, LABELS), LABELS, named, True), dense)
    values = np.array([[[0, 1, 2]]])
    # 3D Slicer left out a first segment: it counts the others from 2, and their values in the file from 1.
    assert decode(values, LABELS, [("RV", 2), ("LV", 3)], False).ravel().tolist() == [IGNORE, 1, 2]
    assert decode(values, LABELS, [("LV", 1), ("rv", 2)], False).ravel().tolist() == [IGNORE, 2, 1]
    bad = [
        ([("RV", 2), ("LV", 3)], np.array([[[2]]])),  # the second value, or segment number two?
        ([("Myo", 1)], np.array([[[1]]])),
        ([("RV", 1), ("LV", 1)], np.array([[[1]]])),
        ([], np.array([[[3]]])),  # "not drawn" in dataset.json, the background here
    ]
    for listed, found in bad:
        with pytest.raises(PclmixError):
            decode(found, LABELS, listed, False)


NRRD = (
    b"NRRD0004\ntype: uint8\ndimension: 3\nspace: left-posterior-superior\nsizes: 10 12 4\n"
    b"space directions: (0,1.25,0) (1.5,0,0) (0,0,-8)\nkinds: domain domain domain\nencoding: %s\n"
    b"space origin: (-40,-30,20)\n%s\n"
)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (NRRD % (b"raw", b"") + bytes(479) + b"\2", 200),
        (NRRD % (b"raw", b"") + bytes(100), 400),
        (NRRD % (b"raw", b"data file: /etc/passwd\n"), 400),
        (NRRD % (b"bzip2", b"") + b"BZh9", 400),
        (NRRD.replace(b"10 12 4", b"99999 99999 99999") % (b"raw", b""), 400),
        (NRRD.replace(b"space: left-posterior-superior\n", b"") % (b"raw", b"") + bytes(480), 400),
        (NRRD % (b"raw", b"Segment0_Name:=RV\nSegment0_LabelValue:=" + b"9" * 5000 + b"\n") + bytes(480), 400),
        (b"NRRD0004\n", 400),
        (b"", 400),
    ],
    ids=["good", "cut", "another file", "bzip2", "huge", "no space", "digits", "no header", "empty"],
)
def test_nrrd_files(monai, tmp_path, content, status):
    (tmp_path / "label.nrrd").write_bytes(content)
    answer = send(monai, tmp_path / "label.nrrd")
    assert answer.status_code == status, answer.text
    assert b"root:" not in answer.content
    if status == 200:
        assert labels_of(monai.root, "case1")[3, 11, 9] == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        # Not even gzip: what does not have the size of the image is not unpacked.
        (NRRD.replace(b"10 12 4", b"900 900 900") % (b"gzip", b"") + b"\0", "another grid than its image"),
        (b"NRRD0004\n#" + b" " * (2 << 20), "header is longer than 1 MiB"),
    ],
    ids=["voxels", "header"],
)
def test_size_of_nrrd_files_is_limited_before_reading(monai, tmp_path, content, reason):
    (tmp_path / "label.nrrd").write_bytes(content)
    answer = send(monai, tmp_path / "label.nrrd")
    assert answer.status_code == 400
    assert reason in answer.json()["error"]


def test_interface_is_off_by_default(page):
    for path in ("/info/", "/datastore/", "/auth/", "/train/"):
        assert page.client.get(path).status_code == 404
    assert page.client.post("/train/pclmix", json={}).status_code in (404, 405)


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/train/pclmix", "application/x-www-form-urlencoded"),
        ("POST", "/train/pclmix", "text/plain"),
        ("POST", "/train/pclmix", "multipart/form-data; boundary=x"),
        ("POST", "/train/pclmix", ""),
        ("POST", "/train/", "TEXT/PLAIN; charset=utf-8"),
        ("POST", "/activelearning/first", "text/plain"),
        ("POST", "/datastore/label", "multipart/form-data; boundary=x"),
        ("POST", "/api/jobs/train", "application/json"),
    ],
)
def test_form_requests_change_nothing(monai, method, path, kind):
    before = listing(monai.root)
    answer = httpx.request(method, f"{monai.url}{path}", content=b"{}", headers={"content-type": kind} if kind else {})
    assert answer.status_code in (403, 405)
    assert monai.client.get("/api/jobs").json()["job"] is None
    assert listing(monai.root) - before <= {".pclmix/jobs/lock"}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"host": "evil.example"},
    ],
)
def test_other_sites_are_refused(monai, headers):
    for method, path in (
        ("GET", "/info/"),
        ("POST", "/train/pclmix"),
        ("POST", "/infer/pclmix?image=case1"),
        ("DELETE", "/train/"),
    ):
        content = b"{}" if method == "POST" else None
        answer = httpx.request(
            method, f"{monai.url}{path}", content=content, headers={"content-type": "application/json", **headers}
        )
        assert answer.status_code in (400, 403), path
    assert httpx.options(f"{monai.url}/datastore/label", headers={"origin": "https://evil.example"}).status_code >= 400


def test_other_addresses_need_the_token(serve, dataset, tmp_path):
    rules = Rules.of("0.0.0.0", monailabel=True)
    page = serve(dataset, rules)
    client = client_of(page, tmp_path / "client")
    assert client.auth_enabled() is True
    for path in ("/info/", "/datastore/", "/datastore/image?image=case1", "/train/", "/auth/token/valid"):
        assert page.client.get(path).status_code == 401, path
    assert not client.auth_valid_token()
    refused(401, client.auth_token, "me", "guess")
    client.update_auth(client.auth_token("me", rules.token))
    assert client.auth_valid_token()
    assert client.info()["labels"] == ["RV", "LV", "Background"]
    assert client.next_sample("first", {})["id"] in ("case1", "case2")
    label = client.download_label("case1", "final")
    client.save_label("case1", label, params={"label_info": INFO})
    assert client.info()["datastore"]["total"] == 2


def test_an_image_can_be_added(monai, tmp_path):
    client = client_of(monai, tmp_path / "client")
    image = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti1Image(np.ones((5, 6, 7), np.int16), np.eye(4)), image)
    assert client.upload_image(str(image), "new scan")["image"] == "new_scan"
    assert "new_scan" in client.datastore()["objects"]
    refused(400, client.upload_image, str(image), "new scan")


def test_pictures_are_refused(tmp_path):
    from browsing import pictures

    with pytest.raises(PclmixError, match="--monailabel"):
        create_app(pictures(tmp_path / "set"), Rules(monailabel=True))

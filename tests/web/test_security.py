"""Access control, and confinement to the dataset folder."""

from __future__ import annotations

import http.client

import httpx
import pytest

from pclmix.web.security import Rules

SECRET = "not for the browser"


def raw_get(url: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Send a request with the path unchanged; httpx would normalise it."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.putrequest("GET", path, skip_host=headers is not None and "Host" in headers)
    for key, value in (headers or {}).items():
        connection.putheader(key, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/static/../../secret.txt",
        "/vendor/%2e%2e/%2e%2e/%2e%2e/secret.txt",
        "//etc/passwd",
        "/%00",
        "/api/cases/..%2f..%2fsecret.txt/strokes",
        "/api/cases/../secret/strokes",
        "/api/cases/%2e%2e%2fsecret/image/0",
        "/api/cases/case1/image/../../../dataset.json",
        "/api/cases/case1/image/-1",
        "/api/cases/case1/image/7",
        "/api/cases/..%5c..%5csecret/history",
        "/api/progress?case=../secret",
    ],
)
def test_path_traversal_is_refused(page, path):
    (page.root.parent / "secret.txt").write_text(SECRET)
    status, body = raw_get(page.url, path)
    assert status in (400, 404, 405, 422)
    assert SECRET.encode() not in body
    assert b"root:" not in body


@pytest.mark.parametrize("folder", ["imagesTr", "labelsTr"])
def test_links_out_of_the_folder_are_refused(page, tmp_path, folder):
    name = "case2_0000.nii.gz" if folder == "imagesTr" else "case2.nii.gz"
    target = page.root / folder / name
    outside = tmp_path / "outside.nii.gz"
    target.rename(outside)
    target.symlink_to(outside)
    before = outside.read_bytes()
    if folder == "imagesTr":
        assert page.client.get("/api/cases/case2/image/0").status_code == 403
    else:
        assert page.client.get("/api/cases/case2/strokes").status_code == 403
        body = {"version": "x", "runs": [[0, 1, 1]]}
        assert page.client.post("/api/cases/case2/strokes", json=body).status_code == 403
    assert outside.read_bytes() == before
    archive = page.client.get("/api/export/dataset.zip").content
    assert f"{folder}/{name}".encode() not in archive


def test_linked_internal_folder_is_refused(page, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (page.root / ".pclmix").symlink_to(tmp_path / "elsewhere")
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    answer = page.client.post("/api/cases/case1/strokes", json={"version": version, "runs": [[0, 1, 1]]})
    assert answer.status_code == 403
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"x-pclmix": "0"},
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
    ],
)
def test_requests_from_other_sites_change_nothing(page, headers):
    version = page.client.get("/api/cases/case1/strokes").headers["x-version"]
    body = {"version": version, "runs": [[0, 1, 1]]}
    answer = page.client.post("/api/cases/case1/strokes", json=body, headers=headers)
    assert answer.status_code == (400 if "host" in headers else 403)
    assert page.client.get("/api/cases/case1/strokes").headers["x-version"] == version


def test_a_plain_form_cannot_post(page):
    answer = httpx.post(f"{page.url}/api/jobs/stop", data={"a": "b"})
    assert answer.status_code == 403


def test_dns_rebinding_is_refused(page):
    assert raw_get(page.url, "/api/dataset", {"Host": "attacker.example:80"})[0] == 400
    assert page.client.get("/api/dataset", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert page.client.get("/api/export/dataset.zip", headers=link).status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        "[::1].evil.com",
        "[::1",
        "::1",
        "[::1]x",
        "127.0.0.1:8810@evil.com",
        "evil.com@127.0.0.1",
        "127.0.0.1/evil.com",
        "127.0.0.1:80:80",
        "127.0.0.1 evil.com",
        "",
    ],
)
def test_malformed_hosts_are_refused(page, host):
    status, body = raw_get(page.url, "/api/dataset", {"Host": host})
    assert status == 400
    assert b"case1" not in body


@pytest.mark.parametrize("host", ["[::1]:8765", "[::1]", "localhost", "LOCALHOST:1", "127.0.0.1:8810"])
def test_local_hosts_are_accepted(page, host):
    assert raw_get(page.url, "/api/dataset", {"Host": host})[0] == 200


def test_localhost_needs_no_token_and_any_other_address_does():
    for host in ("127.0.0.1", "localhost", "::1"):
        assert Rules.of(host).token is None
    for host in ("0.0.0.0", "::", "192.168.1.5", "workstation"):
        assert len(Rules.of(host).token or "") >= 24


def test_every_request_needs_the_token(serve, dataset):
    rules = Rules.of("0.0.0.0")
    page = serve(dataset, rules)
    for path in ("/", "/app.js", "/api/dataset", "/api/cases/case1/image/0", "/api/events", "/nothing"):
        assert page.client.get(path).status_code == 401, path
    assert page.client.post("/api/jobs/stop").status_code in (401, 413)
    assert page.client.get("/", params={"token": "wrong"}).status_code == 401
    assert page.client.get("/api/dataset", headers={"authorization": f"Bearer {rules.token}"}).status_code == 200
    opened = page.client.get("/", params={"token": rules.token})
    assert opened.status_code == 200
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert page.client.get("/api/dataset").status_code == 200  # the client keeps cookies, as a browser does
    assert page.client.get("/api/dataset", headers={"origin": "https://evil.example"}).status_code == 403


def test_security_headers(page):
    refused = {"host": "evil.example"}
    for path, headers in (("/api/dataset", {}), ("/", {}), ("/nothing.js", {}), ("/api/dataset", refused)):
        answer = page.client.get(path, headers=headers)
        assert "default-src 'none'" in answer.headers["content-security-policy"], path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == ("no-store" if path.startswith("/api") else "no-cache")
        assert "access-control-allow-origin" not in answer.headers


def test_large_bodies_are_refused(page):
    for headers in ({"content-length": str(1 << 30)}, {"transfer-encoding": "chunked"}):
        connection = http.client.HTTPConnection(page.url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/api/jobs/train")
        for key, value in {**headers, "x-pclmix": "1"}.items():
            connection.putheader(key, value)
        connection.endheaders()
        assert connection.getresponse().status == 413

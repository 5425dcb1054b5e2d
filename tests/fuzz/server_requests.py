"""Random requests for the workbench and for MONAI Label's interface, and random bytes for the HTTP server.

No answer may be a 5xx other than 507, none may be large, and the server must go on answering.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import mutations as change
from readers import CORPUS, LARGEST, READERS, Reader, kept_folder, require
from seeds import LABELS, register

from pclmix.data.dataset import write_dataset_json
from pclmix.errors import PclmixError

RUN, CASE = "20260101-000000", "phantom001_frame01"
_AGAIN = 300  #: requests until the dataset is made anew
_LARGEST_REFUSAL = 5000  #: bytes
_STREAMS = ("/api/events",)  # without an end
_REPLACED = "$VERSION"  #: in a body: the version of the strokes of CASE


def _seed_requests(monailabel: bool) -> list[dict[str, Any]]:
    """A valid request for every route."""
    run = [[5, 3, 1], [9, 2, -1]]
    gets = [
        "/", "/app.js", "/api/dataset", f"/api/first?case={CASE}", "/api/progress", f"/api/progress?case={CASE}",
        "/api/export/dataset.zip", "/api/export/predictions.zip", "/api/jobs", "/api/jobs/choices",
        *(f"/api/cases/{CASE}/{name}" for name in (
            "image/0", "image/colour", "thumbnail", "strokes", "history", "prediction", "unsure", "difference",
            "next")),
    ]  # fmt: skip
    posts: list[tuple[str, Any]] = [
        (f"/api/cases/{CASE}/strokes", {"version": _REPLACED, "runs": run, "what": "strokes", "client": "a"}),
        (f"/api/cases/{CASE}/history", {"version": _REPLACED, "id": "000001-1767225600000-strokes", "client": "a"}),
        (f"/api/cases/{CASE}/between", {}),
        ("/api/jobs/train", {"method": "pce", "recipe": "tiny", "minutes": 1, "then": [CASE]}),
        ("/api/jobs/predict", {"run": RUN, "cases": [CASE]}),
        ("/api/jobs/resume", {"id": RUN}),
        ("/api/jobs/stop", {}),
    ]
    made = [{"method": "GET", "path": path} for path in gets]
    made += [{"method": "POST", "path": path, "json": body} for path, body in posts]
    uploads = (("nifti-gz", "new.nii.gz"), ("zip", "new.zip"), ("dicom", "slice.dcm"), ("nifti", "a.nii"))
    made += [{"method": "POST", "path": f"/api/import?name={name}", "corpus": kind} for kind, name in uploads]
    if not monailabel:
        return made
    gets = [
        "/info/", "/datastore/", "/datastore/?output=all", "/datastore/?output=train", f"/datastore/image?image={CASE}",
        f"/datastore/image/info?image={CASE}", f"/datastore/label?label={CASE}&tag=final", "/auth/",
        "/auth/token/valid",
        f"/datastore/label/info?label={CASE}&tag=final", "/train/", "/train/?check_if_running=true",
    ]  # fmt: skip
    info = [{"name": "RV", "idx": 1}, {"name": "Myo", "idx": 2}, {"name": "LV", "idx": 3}]
    own = [{"method": "GET", "path": path} for path in gets]
    own += [
        {"method": "POST", "path": "/activelearning/where_next", "json": {"client_id": "a"}},
        {"method": "POST", "path": "/activelearning/first", "json": {}},
        {"method": "POST", "path": "/train/pclmix", "json": {"minutes": 1, "method": ["pce"], "recipe": ["tiny"]}},
        {"method": "POST", "path": "/train/", "json": {"pclmix": {"minutes": 1, "method": "pce"}}},
        {"method": "DELETE", "path": "/train/"},
        {"method": "POST", "path": f"/infer/pclmix?image={CASE}", "form": {"params": {"result_extension": ".nrrd"}}},
        {"method": "POST", "path": f"/infer/pclmix?image={CASE}&output=image", "form": {"params": {}}},
        {"method": "POST", "path": "/auth/token", "form": {"username": "a", "password": "b"}},
        {
            "method": "PUT",
            "path": f"/datastore/label?image={CASE}&tag=final",
            "form": {"params": {"label_info": info, "client_id": "a", "kind": "mask"}},
            "files": {"label": ["labels.seg.nrrd", "nrrd"]},
        },
        {
            "method": "PUT",
            "path": f"/datastore/label?image={CASE}",
            "form": {"params": {}},
            "files": {"label": ["labels.nii.gz", "nifti-gz"]},
        },
        {"method": "PUT", "path": "/datastore/?image=new", "form": {}, "files": {"file": ["a.nii.gz", "nifti-gz"]}},
    ]
    return own + own + made


_HEADERS = {
    "host": ("evil.example", "[::1", "[::1].evil.com", "127.0.0.1:8810@evil.com", "", "localhost", "127.0.0.1:1", "é"),
    "origin": ("null", "http://evil.example", "http://127.0.0.1:8000", "x", "://"),
    "content-type": ("text/plain", "application/json; charset=latin-1", "multipart/form-data", "multipart/form-data; "
                     "boundary=", "application/x-www-form-urlencoded", "", "a/b; charset=\x7f",
                     "application/json; charset=zz"),
    "range": ("bytes=0-", "bytes=5-2", "bytes=-1", "bytes=a-b", "bytes=0-1,3-4", "lines=1", f"bytes={'9' * 400}-",
    "bytes=" + "0-0," * 500),
    "if-range": ("x", '"x"', "Thu, 01 Jan 1970"),
    "if-none-match": ("*", "x", '"' * 50),
    "if-modified-since": ("x", "Thu, 99 Jan 1970 00:00:00 GMT", "9" * 500),
    "cookie": ("pclmix_token=x", "a=b; c", "=" * 40, "a[=]", "pclmix_token=é"),
    "authorization": ("Bearer x", "Bearer", "Basic eA==", "é"),
    "accept-encoding": ("gzip;q=a", "", "*;q=0"),
    "x-pclmix": ("0", "", "1, 1"),
    "sec-fetch-site": ("cross-site", "same-origin", "x"),
    "content-encoding": ("gzip", "br"),
    "expect": ("100-continue", "x"),
    "x-http-method-override": ("DELETE",),
}  # fmt: skip


def mutate(seeds: list[dict[str, Any]], rng: Random) -> bytes:
    """One request, as JSON."""
    asked = json.loads(json.dumps(rng.choice(seeds)))
    headers: dict[str, str] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.35 and "json" in asked:
            asked["json"] = change.tree(rng, asked["json"])
        elif kind < 0.35 and asked.get("form"):
            asked["form"] = change.tree(rng, asked["form"])
        elif kind < 0.5 and ("json" in asked or "corpus" in asked or "files" in asked or "body" in asked):
            asked = _with_other_body(rng, asked)
        elif kind < 0.75:
            asked["path"] = _other_path(rng, asked["path"])
        elif kind < 0.82:
            asked["method"] = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "x"))
        else:
            name = rng.choice(list(_HEADERS))
            headers[name] = rng.choice(_HEADERS[name])
    try:
        return json.dumps({**asked, **({"headers": headers} if headers else {})}).encode()
    except (ValueError, RecursionError):  # an integer too long to print
        return json.dumps({**asked, "json": None, "form": {}, "body": "9" * 5000, "type": "application/json"}).encode()


def _with_other_body(rng: Random, asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("files"):
        name, (file, kind, *_) = next(iter(asked["files"].items()))
        kind = kind if kind in READERS else "nrrd"
        body, file = _damaged(rng, kind), rng.choice((file, "a.nrrd", "b.nii", "../c.nii.gz", "d.png", "", "é.nii.gz"))
        return {**asked, "files": {name: [file, body.decode("latin-1"), "raw"]}}
    if "corpus" in asked:
        kind = rng.choice((asked["corpus"], asked["corpus"], "png", "tiff", "bmp", "nrrd"))
        names = (
            "a.nii.gz",
            "a.nii",
            "a.png",
            "a.tif",
            "a.bmp",
            "a.zip",
            "a.dcm",
            "a_0001.nii.gz",
            "..",
            "x/../a.nii.gz",
        )
        path = asked["path"] if rng.random() < 0.5 else f"/api/import?name={rng.choice(names)}"
        body = _damaged(rng, kind)
        return {"method": "POST", "path": path, "body": body.decode("latin-1")}
    body = change.of_json(rng, _text(asked.pop("json", {})))
    return {**asked, "body": body[:300_000].decode("latin-1"), "type": "application/json"}


def _damaged(rng: Random, kind: str) -> bytes:
    path = rng.choice(sorted(p for p in (CORPUS / kind).iterdir() if not p.name.startswith("found-")))
    return READERS[kind].mutate(rng, path.name, path.read_bytes())[: 1 << 20]


def _other_path(rng: Random, path: str) -> str:
    place, mark, query = path.partition("?")
    if mark and rng.random() < 0.6:
        words = [word.partition("=") for word in query.split("&")]
        at = rng.randrange(len(words))
        said = rng.choice((rng.choice(change.TEXTS), CASE, "phantom002_frame01", "x" * 600))
        new = quote(said, safe=rng.choice(("", "/%&=")), errors="surrogatepass")
        words[at] = (rng.choice((words[at][0], words[at][0], "x", "")), "=", new)
        words += words[at : at + 1] if rng.random() < 0.2 else []
        return f"{place}?{'&'.join(''.join(word) for word in words)}"
    parts = place.split("/")
    at = rng.randrange(1, len(parts)) if len(parts) > 1 else 0
    texts = (
        rng.choice(change.TEXTS),
        "phantom002_frame01",
        RUN,
        "..",
        "-1",
        "7",
        "%2e%2e",
        "%2f",
        "colour",
        "9" * 400,
        "%",
        "%zz",
    )
    said = rng.choice(texts)
    parts[at] = said if said.startswith("%") else quote(said, safe="", errors="surrogatepass")
    if rng.random() < 0.15:
        parts.insert(at, rng.choice(("", "..", "api", "%00")))
    return "/".join(parts) + mark + query


class FakePopen(subprocess.Popen):  # type: ignore[type-arg]
    """A training that ends at once."""

    def __init__(self, words: list[str], **options: Any) -> None:
        super().__init__([shutil.which("true") or "/bin/true"], **options)


class _NoTraining:
    """In place of the module subprocess."""

    Popen, DEVNULL = FakePopen, subprocess.DEVNULL


@dataclass
class Server:
    """The application on a dataset with strokes, a model and a prediction; made anew now and then."""

    monailabel: bool
    sent: int = 0
    folder: Path | None = None
    client: Any = None
    _stop: list[Any] = field(default_factory=list)

    def ready(self) -> Any:
        import pclmix.web.jobs

        pclmix.web.jobs.subprocess = _NoTraining  # type: ignore[misc, assignment]
        if self.client is None or self.sent % _AGAIN == 0:
            self.close()
            self._start()
        self.sent += 1
        return self.client

    def _start(self) -> None:
        from starlette.testclient import TestClient

        from pclmix.web.archives import Limits
        from pclmix.web.security import Rules
        from pclmix.web.serve import create_app

        self.folder = kept_folder("server")
        limits = Limits(upload=8 << 20, unpacked=LARGEST, files=50)
        app = create_app(make_dataset(self.folder), Rules(monailabel=self.monailabel), limits)
        client = TestClient(app, base_url="http://127.0.0.1:8000", headers={"x-pclmix": "1"}, follow_redirects=False)
        self.client = client.__enter__()

    def close(self) -> None:
        if self.client is not None:
            self.client.__exit__(None, None, None)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.client = None


@cache
def _prepared() -> Path:
    """The dataset of all servers; each gets a copy."""
    from pclmix.inference import load
    from pclmix.web.strokes import StrokeStore
    from pclmix.web.workspace import PredictionStore, Workspace

    register()
    root = kept_folder("dataset") / "set"
    for name, place, file in (("int16", "imagesTr", "_0000"), ("labels", "labelsTr", "")):
        (root / place).mkdir(parents=True)
        for case in (CASE, "phantom002_frame01"):
            shutil.copyfile(CORPUS / "nifti-gz" / f"{name}.nii.gz", root / place / f"{case}{file}.nii.gz")
    write_dataset_json(root, channels=["MRI"], labels=LABELS, ending=".nii.gz", cases=2)
    run = root / ".pclmix" / "runs" / RUN
    run.mkdir(parents=True)
    shutil.copyfile(CORPUS / "checkpoint" / "model.ckpt", run / "last.ckpt")
    shutil.copyfile(CORPUS / "json" / "run.json", run / "run.json")
    workspace = Workspace(root)
    strokes = StrokeStore(workspace)
    volume = workspace.dataset.read_image(CASE)
    found = load(run, device="cpu").examine(volume.array)
    PredictionStore(workspace).write(RUN, CASE, found, volume.geometry, LABELS, strokes.read(CASE).array)
    strokes.save(CASE, strokes.read(CASE).version, [(0, 5, 1)])
    return root


def make_dataset(folder: Path) -> Path:
    return Path(shutil.copytree(_prepared(), folder / "set"))


_SERVERS = {False: Server(False), True: Server(True)}


def _send(monailabel: bool, path: Path, folder: Path) -> None:
    content = json.loads(path.read_bytes())
    refused = [
        answer for asked in (content if isinstance(content, list) else [content]) if (answer := _one(monailabel, asked))
    ]
    if refused:
        raise PclmixError(refused[0])


def _one(monailabel: bool, asked: dict[str, Any]) -> str:
    """Send one request; the text of a refusal, else nothing."""
    client = _SERVERS[monailabel].ready()
    url = asked["path"]
    if url.split("?")[0].rstrip("/") in _STREAMS:
        return "a stream"
    url = url if url.startswith("/") else f"/{url}"
    headers = {"content-type": asked["type"]} if "type" in asked else {}
    headers |= {key: value.encode("utf-8", "surrogatepass") for key, value in asked.get("headers", {}).items()}
    options: dict[str, Any] = {}
    if "body" in asked:
        options["content"] = asked["body"].encode("latin-1")
    elif "corpus" in asked:
        options["content"] = next(p for p in sorted((CORPUS / asked["corpus"]).iterdir())).read_bytes()
    elif "form" in asked:
        form = asked["form"] if isinstance(asked["form"], dict) else {"params": asked["form"]}
        options["data"] = {
            str(key).encode("utf-8", "replace").decode(): value.encode("utf-8", "replace").decode()
            if isinstance(value, str)
            else _text(value).decode("utf-8", "replace")
            for key, value in form.items()
        }
        options["files"] = [(name, _file(*given)) for name, given in asked.get("files", {}).items()] or None
    elif "json" in asked:
        options["content"] = _text(asked["json"]).replace(_REPLACED.encode(), _version(client).encode())
        headers.setdefault("content-type", "application/json")
    try:
        request = client.build_request(asked["method"], f"http://127.0.0.1:8000{url}", headers=headers, **options)
    except Exception as error:  # a URL that the client refuses to send
        return f"not sent: {error!r}"
    answer = client.send(request)
    status, body = answer.status_code, answer.content
    require(status < 500 or status == 507, f"status {status}: {body[:300]!r}")
    if status >= 400:
        require(len(body) <= _LARGEST_REFUSAL, f"status {status} with {len(body)} bytes")
        return f"{status} {body[:200].decode('utf-8', 'replace')}"
    return ""


def _file(name: str, content: str, how: str = "corpus") -> tuple[str, bytes]:
    if how == "raw":
        return name, content.encode("latin-1")
    seeds = sorted(p for p in (CORPUS / content).iterdir() if p.name.startswith("labels"))
    return name, seeds[0].read_bytes()


def _text(content: Any) -> bytes:
    try:
        return change.text(content)
    except (ValueError, RecursionError):
        return b"9" * 5000


def _version(client: Any) -> str:
    answer = client.get(f"/api/cases/{CASE}/strokes")
    return str(answer.headers.get("x-version", "none"))


class Listener(logging.Handler):
    """Errors that the server logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(self.format(record))


@cache
def _real() -> tuple[tuple[str, int], Listener]:
    """A real server on a free port, with short time limits."""
    import uvicorn

    from pclmix.web.archives import Limits
    from pclmix.web.security import Rules
    from pclmix.web.serve import PatientProtocol, create_app, server_config

    class Impatient(PatientProtocol):
        head_seconds, stall_seconds, every = 0.4, 0.4, 0.1

    app = create_app(make_dataset(kept_folder("http")), Rules(monailabel=True), Limits(8 << 20, LARGEST, 50))
    config = server_config(app, port=0)
    config.http = Impatient
    listener = Listener()
    for name in ("uvicorn.error", "asyncio", "pclmix.web.common"):
        logging.getLogger(name).addHandler(listener)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server.servers[0].sockets[0].getsockname()[:2], listener


def _http_seeds() -> bytes:
    head = "Host: 127.0.0.1:8765\r\n"
    body = '{"version": "x", "runs": [[0, 1, 1]]}'
    posted = f"{head}x-pclmix: 1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    chunked = f"{head}x-pclmix: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    requests = (
        f"GET /api/dataset HTTP/1.1\r\n{head}\r\n",
        f"GET /api/events HTTP/1.1\r\n{head}\r\n",
        f"HEAD / HTTP/1.0\r\n{head}Connection: keep-alive\r\n\r\n",
        f"POST /api/cases/{CASE}/strokes HTTP/1.1\r\n{posted}",
        f"POST /api/import?name=a.nii.gz HTTP/1.1\r\n{chunked}",
        f"GET /api/cases/{CASE}/image/0 HTTP/1.1\r\n{head}Range: bytes=0-9\r\n\r\n",
        f"GET /app.js HTTP/1.1\r\n{head}Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        f"GET /info/ HTTP/1.1\r\n{head}Cookie: a=b\r\nExpect: 100-continue\r\n\r\n",
        f"GET /api/jobs HTTP/1.1\r\n{head}\r\nGET /api/progress HTTP/1.1\r\n{head}\r\n",
    )
    return "\x1e".join(requests).encode()


_WORDS = (
    b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b":", b"Host: a\r\nHost: b", b"Transfer-Encoding: chunked\r\n",
    b"HTTP/9.9",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n",
    b"GET", b"%00", b"/../", b"?" * 50, b"x" * 70_000, b"a: " + b"b" * 20_000 + b"\r\n", b"\xff\xfe",
    b"PRI * HTTP/2.0\r\n\r\nSM",
    b"fffffffffffffffff\r\n", b"0\r\n\r\n", b"http://evil.example/", b"*", b"\x16\x03\x01",
)  # fmt: skip


def mutate_http(rng: Random, data: bytes) -> bytes:
    """Bytes of one request, with words of the protocol in wrong places."""
    out = rng.choice(data.split(b"\x1e"))
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(out) + 1)
        kind = rng.random()
        if kind < 0.5:
            out = out[:at] + rng.choice(_WORDS) + out[at + rng.choice((0, 0, 1, 5, 20)) :]
        elif kind < 0.7:
            lines = out.split(b"\r\n")
            place = rng.randrange(len(lines))
            lines.insert(place, lines[rng.randrange(len(lines))])
            out = b"\r\n".join(lines)
        elif kind < 0.8:
            out = out[:at]
        else:
            out = change.of_bytes(rng, out)
    return out


def _http(path: Path, folder: Path) -> None:
    """Send the bytes, then read until the server closes; afterwards it must still answer."""
    address, listener = _real()
    listener.heard.clear()
    got = b""
    for part in path.read_bytes().split(b"\x1e"):
        got = _exchange(address, part, 0.2)
        for line in got.split(b"\r\n"):
            if line.startswith(b"HTTP/1.1 5") and not line.startswith(b"HTTP/1.1 507"):
                raise AssertionError(f"answer {line[:60]!r}")
    _health["inputs"] += 1
    if _health["inputs"] % 20 == 1:
        asked = b"GET /api/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        alive = _exchange(address, asked, 20.0)
        require(alive.startswith(b"HTTP/1.1 200"), f"the server answers {alive[:80]!r}")
    require(not listener.heard, f"logged: {' | '.join(listener.heard)[-600:]}")
    if not got.startswith((b"HTTP/1.1 2", b"HTTP/1.1 3")):
        raise PclmixError("refused")


_health = {"inputs": 0}


def _exchange(address: tuple[str, int], data: bytes, patience: float) -> bytes:
    """Send, and read until the server closes or has said nothing for a while."""
    found = BytesIO()
    with socket.create_connection(address, timeout=30) as connection, suppress(ConnectionError, TimeoutError):
        connection.sendall(data)
        connection.settimeout(patience)
        while chunk := connection.recv(65536):
            found.write(chunk)
            if found.tell() > 1 << 22:
                break
            connection.settimeout(0.02 if patience < 1 else patience)
    return found.getvalue()


def _reader(monailabel: bool) -> Reader:
    def make(rng: Random, _: str, data: bytes) -> bytes:
        return mutate(json.loads(data), rng)

    return Reader(make, lambda path, folder: _send(monailabel, path, folder), heavy=True)


READERS |= {
    "server": _reader(False),
    "monailabel": _reader(True),
    "http": Reader(lambda rng, _, data: mutate_http(rng, data), _http, heavy=True),
}


def write_seeds() -> None:
    for name, monailabel in (("server", False), ("monailabel", True)):
        (CORPUS / name).mkdir(exist_ok=True)
        (CORPUS / name / "requests.json").write_text(json.dumps(_seed_requests(monailabel), indent=1))
    (CORPUS / "http").mkdir(exist_ok=True)
    (CORPUS / "http" / "requests.txt").write_bytes(_http_seeds())

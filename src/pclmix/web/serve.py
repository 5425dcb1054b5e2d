"""The server: lock the dataset, build the application, listen, open the browser."""

from __future__ import annotations

import asyncio
import logging
import mimetypes
import os
import re
import shutil
import socket
import threading
import webbrowser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from filelock import lock_descriptor
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from pclmix.data.dataset import IMAGES, SCRIBBLES
from pclmix.errors import PclmixError
from pclmix.io.files import read_json, write_json
from pclmix.io.threads import limit_heaps
from pclmix.web.archives import Limits, MiB
from pclmix.web.common import Bench, add_error_answers
from pclmix.web.jobs import Jobs
from pclmix.web.routes import routers
from pclmix.web.security import Guard, Rules, bracketed
from pclmix.web.strokes import StrokeStore
from pclmix.web.workspace import Workspace, make_dataset

STATIC = Path(__file__).parent / "static"
# Some systems map .js to text/plain, which browsers refuse to run as a module.
mimetypes.add_type("text/javascript", ".js")


EVENTS = "/api/events"  #: the only response without an end


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time limits for slow clients."""

    head_seconds = 15.0  #: to receive the request line and headers; also the keep-alive timeout
    stall_seconds = 60.0  #: without progress while receiving a body or sending a response
    body_rate = 1024  #: minimum average bytes per second of a body, once `stall_seconds` have passed
    every = 1.0  #: seconds between two checks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._waiting_since = self._moved = now
        self._received, self._buffered = 0, 0
        self._suspect = False
        self._look = self.loop.call_later(self.every, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = self.loop.time()
        self._received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waiting_since = self._moved = self.loop.time()
        self._received = 0

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request; after a response that has begun nothing can be answered."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:  # the application's own answer is dropped
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        """End an event stream, which would otherwise be cancelled with a traceback."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and cycle.scope["path"] == EVENTS:
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.close()

    def _check(self) -> None:
        stalled = self._is_stalled(self.loop.time())
        if stalled and self._suspect:
            self.transport.abort()  # close() would wait until the client has read everything
            return
        self._suspect = stalled  # on a busy computer a request may have come that is not read yet: look twice
        self._look = self.loop.call_later(self.every, self._check)

    def _is_stalled(self, now: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        if waiting and waiting == self._buffered:
            return now - self._moved > self.stall_seconds
        if waiting or self._buffered:
            self._buffered, self._moved = waiting, now
        if self.cycle is None or self.cycle.response_complete:
            return now - self._waiting_since > self.head_seconds
        if self.conn.their_state is not h11.SEND_BODY or self.flow.read_paused:
            self._moved = now  # the server is processing; the client is not late
            return False
        due = now - self._waiting_since - self.stall_seconds
        return now - self._moved > self.stall_seconds or self._received < due * self.body_rate


def create_app(root: Path, rules: Rules | None = None, limits: Limits | None = None) -> FastAPI:
    """The application for one dataset; `rules` control access (default: this computer only)."""
    bench = Bench(root, limits or Limits())
    app = FastAPI(title="pclmix", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.bench = bench
    add_error_answers(app)
    for router in routers(bench):
        app.include_router(router, prefix="/api")
    rules = rules or Rules()
    if rules.monailabel:
        from pclmix.web.monailabel import client_router

        app.include_router(client_router(bench, rules))
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=rules.hosts, www_redirect=False)
    app.add_middleware(Guard, rules=rules, largest=bench.limits.upload)
    return app


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Not the traceback of a request cut off by Ctrl-C."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn settings: stalled connections are closed, and their number is limited."""
    logging.getLogger("uvicorn.error").addFilter(_is_worth_showing)
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=400,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=3600,  # PatientProtocol closes idle connections, and looks twice
        **options,
    )


ABOUT = "server.json"
#: Names that `io.files.atomic_path` and mkdtemp give to unfinished files.
_UNFINISHED = re.compile(r"^\..*-[a-z0-9_]{8}(?:\.[A-Za-z0-9.]+)?$")


@dataclass(frozen=True)
class Claim:
    """The lock on a dataset; `held` is False where the folder is read-only or does not support locks."""

    workspace: Workspace
    held: bool

    def announce(self, address: str) -> None:
        """Write the address for a second server to report; without the token, since others may read the folder."""
        if self.held:
            with suppress(PclmixError):  # the dataset can be viewed on a full disk
                write_json(self.workspace.internal(ABOUT), {"address": address, "process": os.getpid()})


@contextmanager
def claimed(workspace: Workspace) -> Iterator[Claim]:
    """Lock a dataset for this server; a second server is refused with the address of the first.

    Strokes are merged under locks within one process, so two servers would overwrite each other. The lock is released
    when the process ends, however it ends.
    """
    handle = _open(workspace)
    if handle is None:
        yield Claim(workspace, False)
        return
    try:
        try:
            free = lock_descriptor(handle, blocking=False)
        except OSError:
            yield Claim(workspace, False)
            return
        about = workspace.internal(ABOUT)
        if not free:
            raise PclmixError(
                f"{workspace.root} is open in another workbench{_where(about)}; use that one, or stop it first"
            )
        try:
            yield Claim(workspace, True)
        finally:
            with suppress(OSError):  # the folder may have become read-only
                about.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _open(workspace: Workspace) -> int | None:
    try:
        workspace.internal().mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(workspace.internal("server.lock"), flags, 0o644)
    except OSError:
        return None


def _where(about: Path) -> str:
    """Address and process of the other server, if known."""
    with suppress(PclmixError, KeyError, TypeError):
        content = read_json(about)
        return f" at {content['address']} (process {content['process']})"
    return ""


def sweep(workspace: Workspace) -> int:
    """Remove what killed servers and jobs left unfinished; returns how many files.

    Call only while holding the lock. Files of jobs are left alone while one runs.
    """
    count = 0
    ending = re.escape(workspace.dataset.ending)
    for folder in (workspace.root, workspace.root / IMAGES, workspace.root / SCRIBBLES, workspace.internal()):
        count += _remove_unfinished(list(folder.glob(".*-????????*")), re.compile(rf"{ending}$|\.json$"))
    for name in ("history", "thumbnails", *(("jobs", "runs", "predictions") if _is_idle(workspace) else ())):
        for place, _, files in os.walk(workspace.internal(name)):  # rglob takes a second for a long history
            count += _remove_unfinished((Path(place, f) for f in files if f[0] == "."), re.compile(""))
    count += StrokeStore(workspace).sweep()
    incoming = workspace.internal("incoming")
    if incoming.is_dir():
        count += sum(1 for _ in incoming.iterdir())
        shutil.rmtree(incoming, ignore_errors=True)
    return count


def _is_idle(workspace: Workspace) -> bool:
    """Whether no job runs; False if that cannot be told, as on a full disk."""
    with suppress(OSError):
        return not workspace.internal("jobs").is_dir() or not Jobs(workspace).is_running()
    return False


def _remove_unfinished(paths: Iterable[Path], wanted: re.Pattern[str]) -> int:
    count = 0
    for path in paths:
        if _UNFINISHED.match(path.name) and wanted.search(path.name) and path.is_file() and not path.is_symlink():
            with suppress(OSError):
                path.unlink()
                count += 1
    return count


def run_server(
    root: Path,
    *,
    host: str,
    port: int,
    browser: bool,
    classes: list[str] | None = None,
    max_upload: int = 2048,
    monailabel: bool = False,
) -> None:
    """Serve the workbench of a dataset until Ctrl-C. A running job continues and is found by the next server."""
    limit_heaps()
    if classes is not None:
        make_dataset(root, classes)
    rules = Rules.of(host, monailabel=monailabel)
    with claimed(Workspace(root)) as claim, _listen(host, port) as listener:
        if claim.held:
            sweep(claim.workspace)
        address = address_of(host, listener.getsockname()[1])
        claim.announce(address)
        app = create_app(root, rules, Limits(upload=max_upload * MiB, unpacked=4 * max_upload * MiB))
        shown = address + (f"?token={rules.token}" if rules.token else "")
        print(f"workbench: {shown}", flush=True)
        if monailabel:
            login = "; log in with any name and the token as password" if rules.token else ""
            print(f"3D Slicer, module MONAI Label, server: {address.rstrip('/')}{login}", flush=True)
        print("Press Ctrl-C to stop; a running training continues.", flush=True)
        if browser:
            threading.Timer(0.5, webbrowser.open, [shown]).start()
        with suppress(KeyboardInterrupt):  # the announced way to stop
            uvicorn.Server(server_config(app)).run(sockets=[listener])


def address_of(host: str, port: int) -> str:
    """The URL to open; for a wildcard address, with the name of this computer."""
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    return f"http://{bracketed(shown)}:{port}/"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise PclmixError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host or --port"
        ) from error

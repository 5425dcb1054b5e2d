"""Start the server: lock the dataset, listen, open the browser."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import lock_descriptor

from pclmix.data.dataset import IMAGES, SCRIBBLES
from pclmix.errors import PclmixError
from pclmix.io.files import read_json, write_json
from pclmix.web.security import Rules, bracketed
from pclmix.web.workspace import Workspace

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
    """Remove unfinished files and uploads of servers that were killed; returns how many.

    Call only while holding the lock. Files of jobs are left alone: a job may still run.
    """
    count = 0
    ending = re.escape(workspace.dataset.ending)
    for folder in (workspace.root, workspace.root / IMAGES, workspace.root / SCRIBBLES, workspace.internal()):
        wanted = re.compile(rf"{ending}$|\.json$")
        for path in folder.glob(".*-????????*") if folder.is_dir() else ():
            if _UNFINISHED.match(path.name) and wanted.search(path.name) and path.is_file() and not path.is_symlink():
                with suppress(OSError):
                    path.unlink()
                    count += 1
    incoming = workspace.internal("incoming")
    if incoming.is_dir():
        count += sum(1 for _ in incoming.iterdir())
        shutil.rmtree(incoming, ignore_errors=True)
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
    try:
        import uvicorn

        from pclmix.web.app import create_app, server_config
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "fastapi", "starlette"):
            raise
        raise PclmixError("the workbench needs the extra 'web': pip install '.[web]' in a clone of pclmix") from error
    from pclmix.web.archives import Limits, MiB
    from pclmix.web.serve import claimed, sweep
    from pclmix.web.workspace import Workspace, make_dataset

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

"""Start the server, say where it is, open the browser."""

from __future__ import annotations

import socket
import threading
import webbrowser
from pathlib import Path

from pclmix.errors import PclmixError
from pclmix.web.security import Rules, bracketed


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
    """Serve the workbench of a dataset until Ctrl-C; a job that runs then goes on, and is found again next time."""
    try:
        import uvicorn

        from pclmix.web.app import create_app, server_config
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "fastapi", "starlette"):
            raise
        raise PclmixError("the workbench needs the extra 'web': pip install '.[web]' in a clone of pclmix") from error
    from pclmix.web.locks import claimed, sweep
    from pclmix.web.packing import Limits, MiB
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
        print("Ctrl-C ends it; a training that runs goes on.", flush=True)
        if browser:
            threading.Timer(0.5, webbrowser.open, [shown]).start()
        uvicorn.Server(server_config(app)).run(sockets=[listener])


def address_of(host: str, port: int) -> str:
    """What to open: for an address that means "everywhere", this computer's own name."""
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

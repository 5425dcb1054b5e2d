"""Start the server, say where it is, open the browser."""

from __future__ import annotations

import socket
import threading
import webbrowser
from pathlib import Path

from pclmix.errors import PclmixError


def run_server(
    root: Path, *, host: str, port: int, browser: bool, classes: list[str] | None = None, max_upload: int = 2048
) -> None:
    """Serve the workbench of a dataset until Ctrl-C; a job that runs then goes on, and is found again next time."""
    try:
        import uvicorn

        from pclmix.web.app import create_app
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "fastapi", "starlette"):
            raise
        raise PclmixError("the workbench needs the extra 'web': pip install 'pclmix[web]'") from error
    from pclmix.web.packing import Limits, MiB
    from pclmix.web.security import Rules
    from pclmix.web.workspace import make_dataset

    if classes is not None:
        make_dataset(root, classes)
    rules = Rules.of(host)
    app = create_app(root, rules, Limits(upload=max_upload * MiB, unpacked=4 * max_upload * MiB))
    with _listen(host, port) as listener:
        address = address_of(host, listener.getsockname()[1], rules.token)
        print(f"workbench: {address}", flush=True)
        print("Ctrl-C ends it; a training that runs goes on.", flush=True)
        if browser:
            threading.Timer(0.5, webbrowser.open, [address]).start()
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])


def address_of(host: str, port: int, token: str | None) -> str:
    """What to open: for an address that means "everywhere", this computer's own name."""
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise PclmixError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host or --port"
        ) from error

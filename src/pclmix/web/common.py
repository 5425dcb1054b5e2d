"""What all routes share: the state of a server, server-sent events, responses and errors."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry
from pclmix.web.archives import Limits, TooLargeError
from pclmix.web.cases import CaseIndex, display_nifti
from pclmix.web.jobs import BusyError, Jobs
from pclmix.web.strokes import StaleError, StrokeStore
from pclmix.web.workspace import OutsideError, PredictionStore, UnknownError, Workspace, is_denied, is_full

_EVERY = 0.4  # seconds between two polls of the job
_SILENCE = 15.0  # seconds after which a comment keeps the connection alive


class Bus:
    """A bounded, numbered message queue; each listener continues from its own position."""

    def __init__(self) -> None:
        self._messages: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=500)
        self._guard = threading.Lock()
        self.last = 0

    def publish(self, kind: str, **content: Any) -> None:
        with self._guard:
            self._messages.append((self.last + 1, kind, content))
            self.last += 1

    def since(self, number: int) -> list[tuple[int, str, dict[str, Any]]]:
        return [message for message in list(self._messages) if message[0] > number]


async def stream(bus: Bus, jobs: Jobs) -> AsyncIterator[str]:
    """Events for one page, starting now: the state of the job first and on each change, then messages."""
    seen, before, silence = bus.last, "", 0.0
    yield "retry: 1000\n\n"
    while True:
        state = json.dumps(await run_in_threadpool(jobs.state))
        messages = bus.since(seen)
        if state != before:
            yield f"event: job\ndata: {state}\n\n"
        for number, kind, content in messages:
            seen = number
            yield f"event: {kind}\ndata: {json.dumps(content)}\n\n"
        silence = 0.0 if messages or state != before else silence + _EVERY
        before = state
        if silence > _SILENCE:
            silence = 0.0
            yield ": keep-alive\n\n"
        await asyncio.sleep(_EVERY)


class Bench:
    """Cases, strokes, predictions and jobs of one dataset, and the bus that notifies open pages of changes."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.workspace = Workspace(root)
        self.strokes = StrokeStore(self.workspace)
        self.cases = CaseIndex(self.workspace)
        self.predictions = PredictionStore(self.workspace)
        self.jobs = Jobs(self.workspace)
        self.bus = Bus()
        self.limits = limits


NIFTI = "application/gzip"
_STATUS = ((StaleError, 409), (BusyError, 409), (UnknownError, 404), (OutsideError, 403), (TooLargeError, 413))
_DISK_FULL = (
    "the disk that holds the dataset is full; nothing was saved and nothing was overwritten. "
    "Free some space and save again"
)
_READ_ONLY = (
    "the folder {root} cannot be written; nothing was saved and nothing was overwritten. "
    "Make it and the files in it writable for the user who runs pclmix serve"
)
_SHOWN = 3  # validation errors listed in a response
_log = logging.getLogger(__name__)


class File(FileResponse):
    """A file response with large chunks: reading each one costs a thread switch."""

    chunk_size = 4 << 20


def add_error_answers(app: FastAPI) -> None:
    """Turn every error into {"error": MESSAGE}; no message echoes the request body."""
    app.add_exception_handler(PclmixError, _refused)
    app.add_exception_handler(OSError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _unexpected)


def _unwritable(request: Request, error: Exception) -> JSONResponse | None:
    """The answer to a full disk or a read-only folder."""
    if is_full(error):
        return JSONResponse({"error": _DISK_FULL}, 507)
    if request.method != "GET" and is_denied(error):
        root = request.app.state.bench.workspace.root
        return JSONResponse({"error": _sendable(_READ_ONLY.format(root=root))}, 507)
    return None


def _refused(request: Request, error: Exception) -> JSONResponse:
    answer = _unwritable(request, error)
    if answer is not None:
        return answer
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 400)
    more = {"version": error.version} if isinstance(error, StaleError) else {}
    return JSONResponse({"error": _sendable(str(error)), **more}, status)


def _failed(request: Request, error: Exception) -> JSONResponse:
    answer = _unwritable(request, error)
    if answer is not None:
        return answer
    _log.error("a request failed", exc_info=error)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return JSONResponse({"error": f"the workbench could not read or write a file: {_sendable(reason)}"}, 500)


def _invalid(_: Request, error: Exception) -> JSONResponse:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    named = [f"{'.'.join(str(part) for part in p['loc'][1:])[:60]}: {p['msg'][:120]}" for p in problems[:_SHOWN]]
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return JSONResponse({"error": _sendable(f"the request cannot be used: {'; '.join(named)}{more}")}, 422)


def _plain(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": _sendable(str(error.detail))}, error.status_code, headers=error.headers)


def _left(_: Request, error: Exception) -> Response:
    """The client has gone in the middle of an upload: nobody reads this."""
    return Response(status_code=400)


def _unexpected(_: Request, error: Exception) -> JSONResponse:
    """A bug in the workbench; Starlette logs the traceback after this response."""
    return JSONResponse(
        {"error": f"internal error ({type(error).__name__}); the terminal of pclmix serve shows the traceback"}, 500
    )


def _sendable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def json_answer(content: Any) -> Response:
    """JSON in ASCII: file and dataset names may contain bytes that are not UTF-8."""
    return Response(json.dumps(content), media_type="application/json")


def map_answer(array: Any, geometry: Geometry, case: str) -> Response:
    """A label map on the grid of the image, as NIfTI for the viewer."""
    if array.shape != geometry.shape:
        raise PclmixError(f"the prediction of '{case}' has another size than its image; predict it again")
    return Response(display_nifti(array.astype("uint8"), geometry), media_type=NIFTI)


def image_answer(found: Path | bytes) -> Response:
    return File(found) if isinstance(found, Path) else Response(found, media_type=NIFTI)


def content_disposition(name: str) -> dict[str, str]:
    """Content-Disposition with an ASCII fallback and the full name in UTF-8 (RFC 6266)."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    full = quote(_sendable(name), safe="")
    return {"content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{full}"}


def zip_answer(pieces: Iterator[bytes], name: str) -> Response:
    return StreamingResponse(pieces, media_type="application/zip", headers=content_disposition(name))

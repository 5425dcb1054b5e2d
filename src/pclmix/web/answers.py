"""Responses of the server: errors as JSON with the right status code, files, label maps and zips."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from pclmix.errors import PclmixError
from pclmix.io.volume import Geometry
from pclmix.web.archives import TooLargeError
from pclmix.web.cases import display_nifti
from pclmix.web.jobs import BusyError
from pclmix.web.strokes import StaleError
from pclmix.web.workspace import OutsideError, UnknownError, is_full

NIFTI = "application/gzip"
_STATUS = ((StaleError, 409), (BusyError, 409), (UnknownError, 404), (OutsideError, 403), (TooLargeError, 413))
_DISK_FULL = (
    "the disk that holds the dataset is full; nothing was saved and nothing was overwritten. "
    "Free some space and save again"
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
    app.add_exception_handler(Exception, _unexpected)


def _refused(_: Request, error: Exception) -> JSONResponse:
    if is_full(error):
        return JSONResponse({"error": _DISK_FULL}, 507)
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 400)
    more = {"version": error.version} if isinstance(error, StaleError) else {}
    return JSONResponse({"error": _sendable(str(error)), **more}, status)


def _failed(_: Request, error: Exception) -> JSONResponse:
    if is_full(error):
        return JSONResponse({"error": _DISK_FULL}, 507)
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

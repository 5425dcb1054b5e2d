"""The page's own files, held in memory: the first slice waits for a dozen of them."""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

#: Not left to the system's table, which on some machines has JavaScript as plain text: browsers refuse that.
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class _Page:
    body: bytes
    kind: str
    tag: str


class Pages:
    """ASGI app that serves a folder as it was at the start; "/" is index.html."""

    def __init__(self, folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        self._pages = {f"/{path.relative_to(folder).as_posix()}": _read(path) for path in files}
        self._pages["/"] = self._pages["/index.html"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        page = self._pages.get(request.url.path)
        if page is None:
            return PlainTextResponse("there is no such page", 404)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this page can only be read", 405)
        headers = {"etag": page.tag, "content-length": str(len(page.body))}
        if request.headers.get("if-none-match") == page.tag:
            return Response(status_code=304, headers={"etag": page.tag})
        return Response(b"" if request.method == "HEAD" else page.body, media_type=page.kind, headers=headers)


def _read(path: Path) -> _Page:
    body = path.read_bytes()
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return _Page(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')

"""The server: `create_app` makes the application for one dataset, `server_config` configures uvicorn for it."""

from __future__ import annotations

import asyncio
import mimetypes
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from pclmix.web.answers import add_error_answers
from pclmix.web.archives import Limits
from pclmix.web.bench import Bench
from pclmix.web.routes import routers
from pclmix.web.security import Guard, Rules

STATIC = Path(__file__).parent / "static"
# Some systems map .js to text/plain, which browsers refuse to run as a module.
mimetypes.add_type("text/javascript", ".js")


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

    def _check(self) -> None:
        if self._is_stalled(self.loop.time()):
            self.transport.abort()  # close() would wait until the client has read everything
            return
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


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn settings: stalled connections are closed, and their number is limited."""
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=400,
        timeout_graceful_shutdown=1,
        **options,
    )

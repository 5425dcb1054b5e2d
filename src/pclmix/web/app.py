"""The server: `create_app` makes it for one dataset, `server_config` says how uvicorn runs it."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from pclmix.web.answers import add_error_answers
from pclmix.web.bench import Bench
from pclmix.web.packing import Limits
from pclmix.web.patience import PatientProtocol
from pclmix.web.routes import routers
from pclmix.web.security import Guard, Rules

STATIC = Path(__file__).parent / "static"
#: Some systems list JavaScript as plain text, which browsers refuse to run as a module.
mimetypes.add_type("text/javascript", ".js")


def create_app(root: Path, rules: Rules | None = None, limits: Limits | None = None) -> FastAPI:
    """The workbench of a dataset; `rules` say who may use it (by default this computer alone)."""
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
    """How the app is served: stalled connections are closed, and there may not be more than files can be open."""
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

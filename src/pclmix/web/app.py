"""The server: addresses to calls, no logic. `create_app` makes it for one dataset."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from pclmix import __version__
from pclmix.config import recipe_names
from pclmix.data.dataset import Dataset
from pclmix.errors import PclmixError
from pclmix.web import series
from pclmix.web.cases import CaseBook, classes, display_nifti, image_file
from pclmix.web.events import Bus, stream
from pclmix.web.exports import dataset_files, prediction_files, stream_zip
from pclmix.web.jobs import BusyError, Jobs
from pclmix.web.packing import Limits, TooLargeError
from pclmix.web.pages import Pages
from pclmix.web.predictions import PredictionBook, where_next
from pclmix.web.security import Guard, Rules
from pclmix.web.strokes import StaleError, StrokeBook
from pclmix.web.uploads import add, incoming, receive
from pclmix.web.workspace import OutsideError, UnknownError, Workspace

STATIC = Path(__file__).parent / "static"
_STATUS = ((StaleError, 409), (BusyError, 409), (UnknownError, 404), (OutsideError, 403), (TooLargeError, 413))
_NIFTI = "application/gzip"


class File(FileResponse):
    """A file sent in few large pieces: each one waits for a thread."""

    chunk_size = 4 << 20


class Save(BaseModel):
    """Runs (start, length, class or -1) drawn on `version`."""

    version: str = Field(max_length=100)
    runs: list[tuple[int, int, int]] = Field(max_length=2_000_000)
    what: Literal["strokes", "undo", "redo", "clear", "accept", "merge"] = "strokes"
    client: str = Field("", max_length=64)


class Restore(BaseModel):
    version: str = Field(max_length=100)
    id: str = Field(max_length=60)
    client: str = Field("", max_length=64)


class Train(BaseModel):
    method: str = Field("pclmix", max_length=60)
    recipe: str = Field("fast", max_length=60)
    minutes: Annotated[float, Field(gt=0, le=10_000)] | None = None
    then: list[str] = Field(default_factory=list, max_length=100_000)


class Predict(BaseModel):
    run: str = Field(max_length=40)
    cases: list[str] = Field(min_length=1, max_length=100_000)


class Resume(BaseModel):
    id: str = Field(max_length=40)


class Bench:
    """What the addresses below work on."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.workspace = Workspace(root)
        self.strokes = StrokeBook(self.workspace)
        self.cases = CaseBook(self.workspace)
        self.predictions = PredictionBook(self.workspace)
        self.jobs = Jobs(self.workspace)
        self.bus = Bus()
        self.limits = limits


def create_app(root: Path, rules: Rules | None = None, limits: Limits | None = None) -> FastAPI:
    """The workbench of a dataset; `rules` say who may use it (by default this computer alone)."""
    bench = Bench(root, limits or Limits())
    app = FastAPI(title="pclmix", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(PclmixError, _complain)
    for router in (_dataset_routes(bench), _case_routes(bench), _prediction_routes(bench), _job_routes(bench)):
        app.include_router(router, prefix="/api")
    app.mount("/", Pages(STATIC))
    app.add_middleware(Guard, rules=rules or Rules())
    return app


def _complain(_: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 400)
    more = {"version": error.version} if isinstance(error, StaleError) else {}
    return JSONResponse({"error": str(error), **more}, status)


def _dataset_routes(bench: Bench) -> APIRouter:
    api = APIRouter()

    @api.get("/dataset")
    def dataset() -> dict[str, Any]:
        found = bench.workspace.refresh()
        about = {"name": found.name, "folder": str(bench.workspace.root), "channels": found.channels}
        kinds = {"classes": classes(found.labels), "picture": _is_picture(found)}
        cases = [{"name": case, "predictions": bench.predictions.of(case)} for case in found.cases]
        takes = {"upload": bench.limits.upload, "files": bench.limits.files, "dicom": series.is_available()}
        return {**about, **kinds, "takes": takes, "cases": cases, "version": __version__}

    @api.get("/first")
    def first(case: Annotated[str, Query(max_length=500)] = "") -> Response:
        """The image that the page opens with: of this case, or of the first one if there is none of this name."""
        found = bench.workspace.refresh()
        if not found.cases:
            return Response(status_code=204)
        name = case if case in found.cases else found.cases[0]
        answer = _image(bench, name, 0)
        answer.headers["x-case"], answer.headers["x-picture"] = quote(name), str(int(_is_picture(found)))
        return answer

    @api.get("/progress")
    def progress(case: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
        return bench.cases.progress(None if case is None else [bench.workspace.case(name) for name in case])

    @api.post("/import")
    async def upload(request: Request, name: Annotated[str, Query(max_length=500)]) -> dict[str, Any]:
        with incoming(bench.workspace) as folder:
            target = folder / "upload"
            await receive(request.stream(), target, bench.limits.upload)
            added = await run_in_threadpool(add, bench.workspace, target, name, bench.limits)
        bench.bus.publish("cases", added=added.cases)
        return {"cases": added.cases, "notes": added.notes}

    @api.get("/export/dataset.zip")
    def export_dataset() -> Response:
        return _zip(stream_zip(dataset_files(bench.workspace)), f"{bench.workspace.dataset.name}.zip")

    @api.get("/export/predictions.zip")
    def export_predictions() -> Response:
        files = prediction_files(bench.workspace)
        if not files:
            raise UnknownError("there are no predictions yet; train and predict first")
        from pclmix.predict.files import snap_labels  # brings torch, which nothing before this needs

        texts = {"predictions/labels.txt": snap_labels(bench.workspace.dataset.labels)}
        return _zip(stream_zip(files, texts), f"{bench.workspace.dataset.name}-predictions.zip")

    @api.get("/events")
    async def events() -> Response:
        return StreamingResponse(stream(bench.bus, bench.jobs), media_type="text/event-stream")

    return api


def _case_routes(bench: Bench) -> APIRouter:
    api = APIRouter(prefix="/cases/{case}")

    @api.get("/image/{channel}")
    def image(case: str, channel: int) -> Response:
        return _image(bench, case, channel)

    @api.get("/strokes")
    def read(case: str) -> Response:
        found = bench.strokes.read(case)
        headers = {"x-version": found.version, "x-shape": ",".join(map(str, found.array.shape))}
        body = gzip.compress(found.as_bytes(), compresslevel=1)
        return Response(body, headers={**headers, "content-encoding": "gzip"}, media_type="application/octet-stream")

    @api.post("/strokes")
    def save(case: str, change: Save) -> dict[str, str]:
        version = bench.strokes.save(case, change.version, change.runs, change.what)
        bench.bus.publish("strokes", case=case, version=version, client=change.client)
        return {"version": version}

    @api.get("/history")
    def history(case: str) -> list[dict[str, Any]]:
        return [{"id": e.id, "time": e.time, "what": e.what} for e in bench.strokes.history(case)]

    @api.post("/history")
    def restore(case: str, change: Restore) -> dict[str, str]:
        version = bench.strokes.restore(case, change.version, change.id)
        bench.bus.publish("strokes", case=case, version=version, client=change.client)
        return {"version": version}

    return api


def _prediction_routes(bench: Bench) -> APIRouter:
    api = APIRouter(prefix="/cases/{case}")

    @api.get("/prediction")
    def prediction(case: str) -> Response:
        return _map(bench, case, bench.predictions.labels(case)[0])

    @api.get("/unsure")
    def unsure(case: str) -> Response:
        return _map(bench, case, bench.predictions.unsure(case)[0])

    @api.get("/difference")
    def difference(case: str) -> Response:
        return _map(bench, case, bench.predictions.difference(case)[0])

    @api.get("/next")
    def places(case: str) -> list[dict[str, Any]]:
        doubt, second = bench.predictions.unsure(case)
        labels, strokes = bench.predictions.labels(case)[0], bench.strokes.read(case).array
        if strokes.shape != doubt.shape:
            raise PclmixError(f"the prediction of '{case}' is of another size than its image; predict it again")
        return where_next(doubt, labels, second, strokes)

    return api


def _job_routes(bench: Bench) -> APIRouter:
    api = APIRouter(prefix="/jobs")

    @api.get("")
    def jobs() -> dict[str, Any]:
        return {"job": bench.jobs.state(), "runs": bench.jobs.runs()}

    @api.get("/choices")
    def choices() -> dict[str, Any]:
        return {"methods": _methods(), "recipes": recipe_names()}

    @api.post("/train")
    def train(asked: Train) -> dict[str, str]:
        seconds = None if asked.minutes is None else asked.minutes * 60
        then = [bench.workspace.case(case) for case in asked.then]
        cases = bench.cases.drawn()
        if not cases:
            raise PclmixError("nothing is drawn yet; draw strokes of every class in a few slices, then train")
        method, recipe = asked.method, asked.recipe
        return {"id": bench.jobs.train(method=method, recipe=recipe, seconds=seconds, then=then, cases=cases)}

    @api.post("/predict")
    def predict(asked: Predict) -> dict[str, str]:
        return {"id": bench.jobs.predict(asked.run, [bench.workspace.case(case) for case in asked.cases])}

    @api.post("/resume")
    def resume(asked: Resume) -> dict[str, str]:
        return {"id": bench.jobs.resume(asked.id)}

    @api.post("/stop")
    def stop() -> dict[str, str]:
        bench.jobs.stop()
        return {}

    return api


@cache
def _methods() -> list[dict[str, str]]:
    """Methods that learn from strokes; imported on first use, for torch takes its time."""
    from pclmix.methods.base import METHODS, load_all

    load_all()
    return [{"name": name, "summary": kind.summary} for name, kind in METHODS if kind.needs == "scribbles"]


def _is_picture(dataset: Dataset) -> bool:
    return not dataset.ending.startswith(".nii")


def _image(bench: Bench, case: str, channel: int) -> Response:
    found = image_file(bench.workspace, case, channel)
    return File(found) if isinstance(found, Path) else Response(found, media_type=_NIFTI)


def _map(bench: Bench, case: str, array: Any) -> Response:
    """A map over the image's grid, for the viewer."""
    geometry = bench.strokes.read(case).geometry
    if array.shape != geometry.shape:
        raise PclmixError(f"the prediction of '{case}' is of another size than its image; predict it again")
    return Response(display_nifti(array.astype("uint8"), geometry), media_type=_NIFTI)


def _zip(pieces: Any, name: str) -> Response:
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    headers = {"content-disposition": f'attachment; filename="{safe}"'}
    return StreamingResponse(pieces, media_type="application/zip", headers=headers)

"""Routes of the page's own interface under /api. Each validates its body and calls one function."""

from __future__ import annotations

import gzip
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, FailFast, Field
from starlette.concurrency import run_in_threadpool

from pclmix import __version__
from pclmix.config import recipe_names
from pclmix.errors import PclmixError
from pclmix.labels import snap_labels
from pclmix.web import series
from pclmix.web.archives import dataset_files, prediction_files, stream_zip
from pclmix.web.assist import fill_between, where_next
from pclmix.web.cases import classes, image_file, is_coloured, is_picture, thumbnail
from pclmix.web.common import Bench, image_answer, json_answer, map_answer, stream, zip_answer
from pclmix.web.jobs import PLAN, scribble_methods
from pclmix.web.strokes import runs_of
from pclmix.web.uploads import add, receive
from pclmix.web.workspace import UnknownError

_PLACE = 1 << 48  # above the voxel count of any volume; keeps integers within 64 bits for numpy
Place = Annotated[int, Field(strict=True, ge=0, lt=_PLACE)]
Length = Annotated[int, Field(strict=True, ge=1, lt=_PLACE)]
Class = Annotated[int, Field(strict=True, ge=-1, lt=256)]
Name = Annotated[str, Field(max_length=500)]
Names = Annotated[list[Name], FailFast(), Field(max_length=100_000)]


class Save(BaseModel):
    """Runs (start, length, class or -1) drawn on top of `version`."""

    version: str = Field(max_length=100)
    runs: Annotated[list[tuple[Place, Length, Class]], FailFast(), Field(max_length=2_000_000)]
    what: Literal["strokes", "undo", "redo", "clear", "accept", "between", "merge"] = "strokes"
    client: str = Field("", max_length=64)


class Restore(BaseModel):
    version: str = Field(max_length=100)
    id: str = Field(max_length=60)
    client: str = Field("", max_length=64)


class Train(BaseModel):
    method: str = Field("pclmix", max_length=60)
    recipe: str = Field("plan", max_length=60)
    minutes: Annotated[float, Field(strict=True, gt=0, le=10_000, allow_inf_nan=False)] | None = None
    then: Names = Field(default_factory=list)
    warm: Annotated[bool, Field(strict=True)] = True  # start from the last model


class Predict(BaseModel):
    run: str = Field(max_length=40)
    cases: Annotated[Names, Field(min_length=1)]


class Resume(BaseModel):
    id: str = Field(max_length=40)


def routers(bench: Bench) -> list[APIRouter]:
    return [_dataset_routes(bench), _case_routes(bench), _prediction_routes(bench), _job_routes(bench)]


def _dataset_routes(bench: Bench) -> APIRouter:
    api = APIRouter()

    @api.get("/dataset")
    def dataset() -> Response:
        found = bench.workspace.refresh()
        about = {"name": found.name, "folder": str(bench.workspace.root), "channels": found.channels}
        kinds = {"classes": classes(found.labels), "picture": is_picture(found), "coloured": is_coloured(found)}
        cases = [{"name": case, "predictions": bench.predictions.of(case)} for case in found.cases]
        takes = {"upload": bench.limits.upload, "files": bench.limits.files, "dicom": series.is_available()}
        return json_answer({**about, **kinds, "takes": takes, "cases": cases, "version": __version__})

    @api.get("/first")
    def first(case: Annotated[str, Query(max_length=500)] = "") -> Response:
        """The image the page opens with: of this case, or of the first case if it does not exist."""
        found = bench.workspace.refresh()
        if not found.cases:
            return Response(status_code=204)
        name = case if case in found.cases else found.cases[0]
        answer = image_answer(image_file(bench.workspace, name, None if is_coloured(found) else 0))
        answer.headers["x-case"], answer.headers["x-picture"] = (
            quote(name, errors="replace"),
            str(int(is_picture(found))),
        )
        return answer

    @api.get("/progress")
    def progress(case: Annotated[list[str] | None, Query()] = None) -> Response:
        return json_answer(bench.cases.progress(None if case is None else [bench.workspace.case(c) for c in case]))

    @api.post("/import")
    async def upload(request: Request, name: Annotated[str, Query(max_length=500)]) -> dict[str, Any]:
        with bench.workspace.incoming() as folder:
            target = folder / "upload"
            await receive(request.stream(), target, bench.limits.upload)
            added = await run_in_threadpool(add, bench.workspace, target, name, bench.limits)
        bench.bus.publish("cases", added=added.cases)
        return {"cases": added.cases, "notes": added.notes}

    @api.get("/export/dataset.zip")
    def export_dataset() -> Response:
        return zip_answer(stream_zip(dataset_files(bench.workspace)), f"{bench.workspace.dataset.name}.zip")

    @api.get("/export/predictions.zip")
    def export_predictions() -> Response:
        files = prediction_files(bench.workspace)
        if not files:
            raise UnknownError("there are no predictions yet; train and predict first")
        texts = {"predictions/labels.txt": snap_labels(bench.workspace.dataset.labels)}
        return zip_answer(stream_zip(files, texts), f"{bench.workspace.dataset.name}-predictions.zip")

    @api.get("/events")
    async def events() -> Response:
        return StreamingResponse(stream(bench.bus, bench.jobs), media_type="text/event-stream")

    return api


def _case_routes(bench: Bench) -> APIRouter:
    api = APIRouter(prefix="/cases/{case}")

    @api.get("/image/colour")
    def colour(case: str) -> Response:
        return image_answer(image_file(bench.workspace, case, None))

    @api.get("/image/{channel}")
    def image(case: str, channel: int) -> Response:
        return image_answer(image_file(bench.workspace, case, channel))

    @api.get("/thumbnail")
    def small(case: str) -> Response:
        headers = {"cache-control": "private, max-age=60"}
        return Response(thumbnail(bench.workspace, case), headers=headers, media_type="image/png")

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

    @api.post("/between")
    def between(case: str) -> dict[str, Any]:
        found = bench.strokes.read(case)
        bench.workspace.image_paths(case)  # refuses links out of the dataset
        image = bench.workspace.dataset.read_image(case).array
        filled, slices = fill_between(found.array, image, found.geometry.spacing[0])
        return {"version": found.version, "runs": runs_of(filled), "slices": slices}

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
        return map_answer(bench.predictions.labels(case)[0], bench.strokes.read(case).geometry, case)

    @api.get("/unsure")
    def unsure(case: str) -> Response:
        return map_answer(bench.predictions.unsure(case)[0], bench.strokes.read(case).geometry, case)

    @api.get("/difference")
    def difference(case: str) -> Response:
        return map_answer(bench.predictions.difference(case)[0], bench.strokes.read(case).geometry, case)

    @api.get("/next")
    def places(case: str) -> list[dict[str, Any]]:
        doubt, second = bench.predictions.unsure(case)
        labels, strokes = bench.predictions.labels(case)[0], bench.strokes.read(case)
        if not strokes.array.shape == doubt.shape == labels.shape:
            raise PclmixError(f"the prediction of '{case}' has another size than its image; predict it again")
        return where_next(doubt, labels, second, strokes.array, strokes.geometry.spacing)

    return api


def _job_routes(bench: Bench) -> APIRouter:
    api = APIRouter(prefix="/jobs")

    @api.get("")
    def jobs() -> Response:
        return json_answer({"job": bench.jobs.state(), "runs": bench.jobs.runs()})

    @api.get("/choices")
    def choices() -> dict[str, Any]:
        methods = [{"name": name, "summary": summary} for name, summary in scribble_methods()]
        return {"methods": methods, "recipes": [PLAN, *recipe_names()]}

    @api.post("/train")
    def train(asked: Train) -> dict[str, str]:
        seconds = None if asked.minutes is None else asked.minutes * 60
        then = [bench.workspace.case(case) for case in asked.then]
        cases = bench.cases.drawn()
        if not cases:
            raise PclmixError("there are no strokes yet; draw strokes of every class in a few slices, then train")
        method, recipe, warm = asked.method, asked.recipe, asked.warm
        job = bench.jobs.train(method=method, recipe=recipe, seconds=seconds, then=then, cases=cases, warm=warm)
        return {"id": job}

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

"""The REST interface of MONAI Label, so that its module in 3D Slicer works unchanged.

Paths and responses follow MONAI Label 0.8 (https://github.com/Project-MONAI/MONAILabel); fields that its clients do not
read are left out.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from pclmix import __version__
from pclmix.config import recipe_names
from pclmix.errors import PclmixError
from pclmix.io.volume import ENDINGS
from pclmix.web.cases import display_nifti
from pclmix.web.common import NIFTI, Bench, File, content_disposition, json_answer
from pclmix.web.exchange import MODEL, TAGS, Exchange, datastore_stats, describe, predicted, task, train_stats
from pclmix.web.jobs import PLAN, BusyError, scribble_methods
from pclmix.web.labelfiles import names
from pclmix.web.security import Rules
from pclmix.web.uploads import add
from pclmix.web.workspace import UnknownError

_STRATEGIES = {
    "where_next": "the least certain case without newer strokes, then cases without strokes",
    "first": "the first case without strokes",
}
Name = Annotated[str, Query(max_length=500)]
Json = Annotated[dict[str, Any] | None, Body()]


def client_router(bench: Bench, rules: Rules) -> APIRouter:
    exchange = Exchange(bench)
    api = APIRouter()
    for part in (_info_routes, _datastore_routes, _work_routes):
        api.include_router(part(exchange))
    api.include_router(_auth_routes(rules))
    return api


def _auth_routes(rules: Rules) -> APIRouter:
    api = APIRouter(prefix="/auth")

    @api.get("/")
    def enabled() -> Response:
        return json_answer({"enabled": rules.token is not None, "client_id": "pclmix", "realm": ""})

    @api.post("/token")
    async def token(request: Request) -> Response:
        """The password is the token printed by `pclmix serve`; any user name works."""
        form = await request.form(max_files=0, max_fields=10, max_part_size=1000)
        given = str(form.get("password", ""))
        if rules.token is None:
            return json_answer({"access_token": None, "token_type": None})
        if not secrets.compare_digest(given.encode("utf-8", "replace"), rules.token.encode()):
            return JSONResponse({"error": "the password is the token in the address that `pclmix serve` printed"}, 401)
        return json_answer({"access_token": rules.token, "token_type": "Bearer"})

    @api.get("/token/valid")
    def valid() -> Response:
        return json_answer({})  # checked by the guard already

    return api


def _info_routes(exchange: Exchange) -> APIRouter:
    api, bench = APIRouter(), exchange.bench

    @api.get("/info/")
    def info() -> Response:
        labels = bench.workspace.refresh().labels
        described = "the newest model trained on the strokes of this dataset"
        model = {
            "type": "segmentation",
            "labels": list(labels.foreground),
            "dimension": 3,
            "description": described,
            "config": {},
        }
        methods = sorted((name for name, _ in scribble_methods()), key=lambda name: name != MODEL)
        recipes = [PLAN, *recipe_names()]
        trainer = {
            "description": "trains on all strokes",
            "config": {"minutes": 5.0, "method": methods, "recipe": recipes},
        }
        return json_answer(
            {
                "name": f"pclmix: {bench.workspace.dataset.name}",
                "description": "Segmentation from strokes: draw a few of each class and of the background",
                "version": __version__,
                "labels": names(labels),
                "models": {MODEL: model} if exchange.newest_run() else {},
                "trainers": {MODEL: trainer},
                "strategies": {name: {"description": text, "config": {}} for name, text in _STRATEGIES.items()},
                "scoring": {},
                "train_stats": {MODEL: train_stats(bench.jobs.state())},
                "datastore": datastore_stats(bench),
            }
        )

    @api.post("/activelearning/{strategy}")
    def sample(strategy: str, request: Request, params: Json = None) -> Response:
        if strategy not in _STRATEGIES:
            raise UnknownError(f"there is no strategy '{strategy[:60]}'; choose {' or '.join(_STRATEGIES)}")
        case = exchange.next_case(strategy)
        if case is None:
            return json_answer({})
        exchange.views.note(_client(request, params), case, bench.strokes.read(case).array)
        path = bench.workspace.image_paths(case)[0]
        return json_answer({"id": case, "name": path.name, "ts": int(time.time())})

    return api


def _datastore_routes(exchange: Exchange) -> APIRouter:
    api, bench = APIRouter(prefix="/datastore"), exchange.bench

    @api.get("/")
    def datastore(output: Name = "stats") -> Response:
        if output == "stats":
            return json_answer(datastore_stats(bench))
        progress, ending = bench.cases.progress(), bench.workspace.dataset.ending
        objects = {case: describe(bench, case, any(found["voxels"])) for case, found in progress.items()}
        if output == "all":
            return json_answer({"name": bench.workspace.dataset.name, "description": "", "objects": objects})
        drawn = [case for case, about in objects.items() if about["labels"]]
        return json_answer([{"image": f"{case}_0000{ending}", "label": f"{case}{ending}"} for case in drawn])

    @api.api_route("/image", methods=["GET", "HEAD"])
    def image(image: Name) -> Response:
        path = bench.workspace.image_paths(image)[0]
        if not path.is_file():
            raise UnknownError(f"{path.name} does not exist")
        return File(path, media_type=NIFTI, headers=content_disposition(f"{image}{bench.workspace.dataset.ending}"))

    @api.get("/image/info")
    def image_info(image: Name) -> Response:
        return json_answer({"name": bench.workspace.image_paths(image)[0].name})

    @api.api_route("/label", methods=["GET", "HEAD"])
    def label(request: Request, label: Name = "", image: Name = "", tag: Name = TAGS[0]) -> Response:
        case = bench.workspace.case(label or image)
        if tag not in TAGS:
            raise UnknownError(f"'{case}' has no label '{tag[:60]}'; use {' or '.join(TAGS)}")
        array, geometry = exchange.label(case, _address(request))
        headers = content_disposition(f"{case}.nii.gz")
        return Response(display_nifti(array, geometry), media_type=NIFTI, headers=headers)

    @api.get("/label/info")
    def label_info(label: Name, tag: Name = TAGS[0]) -> Response:
        return json_answer(describe(bench, bench.workspace.case(label), True)["labels"].get(tag, {}))

    @api.put("/label")
    async def save(request: Request, image: Name, tag: Name = TAGS[1]) -> Response:
        params, files = await _form(request)
        if "label" not in files:
            raise PclmixError("the file of the label is missing from the form")
        with bench.workspace.incoming() as folder:
            path = await _store(files["label"], folder)
            clients = [_client(request, params), _address(request)]
            version = await run_in_threadpool(exchange.save, image, path, params, clients)
        return json_answer({"image": image, "label": image, "tag": tag, "version": version})

    async def add_image(request: Request, image: Name = "") -> Response:
        _, files = await _form(request)
        if "file" not in files:
            raise PclmixError("the file of the image is missing from the form")
        with bench.workspace.incoming() as folder:
            path = await _store(files["file"], folder)
            wanted = f"{image or 'image'}{path.name.removeprefix('upload')}"
            upload = path.rename(folder / "upload")
            added = await run_in_threadpool(add, bench.workspace, upload, wanted, bench.limits)
        bench.bus.publish("cases", added=added.cases)
        return json_answer({"image": added.cases[0]})

    for path in ("/", "/image"):
        api.put(path)(add_image)
    return api


def _work_routes(exchange: Exchange) -> APIRouter:
    api, bench = APIRouter(), exchange.bench

    @api.post("/infer/{model}")
    async def infer(request: Request, model: str, image: Name = "", session_id: Name = "") -> Response:
        if model != MODEL:
            raise UnknownError(f"there is no model '{model[:60]}'; use {MODEL}")
        if session_id or not image:
            raise PclmixError("sessions are not supported; pass the id of an image of the datastore")
        params, _ = await _form(request)
        return await run_in_threadpool(predicted, exchange, image, str(params.get("result_extension", "")))

    @api.post("/train/{model}")
    @api.post("/train/")
    def train(model: str = MODEL, params: Json = None) -> Response:
        if model != MODEL:
            raise UnknownError(f"there is no model '{model[:60]}'; use {MODEL}")
        own = (params or {}).get(MODEL)  # a request for several trainers
        try:
            exchange.train({**(params or {}), **(own if isinstance(own, dict) else {})})
        except BusyError as error:
            return JSONResponse({"error": str(error)}, 429)
        return json_answer(task(bench.jobs.state()))

    @api.get("/train/")
    def status(check_if_running: bool = False) -> Response:
        state = bench.jobs.state()
        running = state is not None and state["status"] in ("running", "stopping")
        if state is None or (check_if_running and not running):
            return JSONResponse({"error": "no training is running"}, 404)
        return json_answer(task(state))

    @api.delete("/train/")
    def stop() -> Response:
        bench.jobs.stop()
        return json_answer(task(bench.jobs.state()))

    return api


async def _form(request: Request) -> tuple[dict[str, Any], dict[str, UploadFile]]:
    """The field `params` as JSON, and the uploaded files."""
    form = await request.form(max_files=2, max_fields=10, max_part_size=1 << 20)
    try:
        params = json.loads(str(form.get("params") or "{}"))
    except (ValueError, RecursionError) as error:
        raise PclmixError("the field params is not valid JSON") from error
    if not isinstance(params, dict):
        raise PclmixError("the field params must be a JSON object")
    return params, {key: value for key, value in form.multi_items() if isinstance(value, UploadFile)}


async def _store(file: UploadFile, folder: Path) -> Path:
    """Store a file under a fixed name with its own ending."""
    ending = next((e for e in (".seg.nrrd", ".nrrd", *ENDINGS) if (file.filename or "").lower().endswith(e)), None)
    if ending is None:
        raise PclmixError(f"unknown file type; send .nrrd, {', '.join(ENDINGS)}")
    path = folder / f"upload{ending}"
    with path.open("wb") as target:
        while chunk := await file.read(1 << 20):
            target.write(chunk)
    return path


def _client(request: Request, params: dict[str, Any] | None) -> str:
    """The client: its client_id if it sends one, else its address."""
    given = (params or {}).get("client_id")
    return f"id {given[:200]}" if isinstance(given, str) and given else _address(request)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""

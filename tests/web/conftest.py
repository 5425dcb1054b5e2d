"""A small dataset on a grid that is not RAS, and a real server on it."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
import uvicorn

from pclmix.data.dataset import write_dataset_json
from pclmix.io.volume import read_image, write_labels
from pclmix.labels import Labels
from pclmix.web.archives import Limits
from pclmix.web.security import Rules
from pclmix.web.serve import create_app, server_config

LABELS = Labels(("background", "RV", "LV"), 3)
#: x to posterior, y to the left, z downwards: each axis permuted or flipped.
AFFINE = np.array([[0, -1.5, 0, 40], [-1.25, 0, 0, 30], [0, 0, -8, 20], [0, 0, 0, 1]], float)
SHAPE = (4, 12, 10)  #: Z, H, W


@dataclass(frozen=True)
class Running:
    """A server and an HTTP client that sends the header of the page."""

    url: str
    client: httpx.Client
    root: Path


def write_image(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array.transpose(2, 1, 0).astype(np.int16), affine), path)


def write_dataset(root: Path, cases: int = 2) -> Path:
    rng = np.random.default_rng(0)
    for number in range(1, cases + 1):
        image = root / "imagesTr" / f"case{number}_0000.nii.gz"
        write_image(image, rng.integers(0, 500, SHAPE))
        labels = np.full(SHAPE, LABELS.ignore)
        labels[1, 2:5, 3] = 1
        labels[1, 7, 2:6] = 0
        write_labels(root / "labelsTr" / f"case{number}.nii.gz", labels, read_image(image).geometry, LABELS.names)
    write_dataset_json(root, channels=["MRI"], labels=LABELS, ending=".nii.gz", cases=cases, name="small")
    return root


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "small")


Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server in a thread until the end of the test."""
    with ExitStack() as stack:

        def start(root: Path, rules: Rules | None = None, limits: Limits | None = None) -> Running:
            server = uvicorn.Server(server_config(create_app(root, rules, limits), port=0))
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()
            while not server.started:
                time.sleep(0.005)
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            client = stack.enter_context(httpx.Client(base_url=url, headers={"x-pclmix": "1"}, timeout=30))
            stack.callback(thread.join, 10)
            stack.callback(setattr, server, "should_exit", True)
            return Running(url, client, root)

        yield start


@pytest.fixture
def page(serve: Serve, dataset: Path) -> Running:
    return serve(dataset)


class Slices:
    """Make the files of a DICOM series on an oblique plane, with values that identify each voxel."""

    across, down = np.array([0.8, 0.6, 0.0]), np.array([0.0, 0.0, -1.0])
    origin, gap, spacing = np.array([-30.0, 12.0, 55.0]), 8.0, (1.25, 1.5)  # spacing: down a column, along a row

    def __call__(self, uid: str, count: int = 4, shape: tuple[int, int] = (20, 24), **extra: Any) -> list[bytes]:
        return [self._one(uid, z, plane, extra) for z, plane in enumerate(self.values(count, shape))]

    def values(self, count: int = 4, shape: tuple[int, int] = (20, 24)) -> np.ndarray:
        z, y, x = np.meshgrid(range(count), *map(range, shape), indexing="ij")
        return z * 1000 + y * 20 + x

    def place(self, x: float, y: float, z: float) -> np.ndarray:
        """RAS position of a voxel."""
        at = self.origin + z * self.gap * np.cross(self.across, self.down)
        at = at + x * self.spacing[1] * self.across + y * self.spacing[0] * self.down
        return at * (-1, -1, 1)

    def _one(self, uid: str, z: int, plane: np.ndarray, extra: dict[str, Any]) -> bytes:
        from pydicom.dataset import FileDataset, FileMetaDataset
        from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid

        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = MRImageStorage, generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        ds = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
        ds.SOPClassUID, ds.SOPInstanceUID, ds.SeriesInstanceUID = MRImageStorage, meta.MediaStorageSOPInstanceUID, uid
        ds.PatientName, ds.SeriesNumber, ds.SeriesDescription, ds.InstanceNumber = "Doe^Jane", 7, "short axis", z
        ds.ImageOrientationPatient = [*self.across.tolist(), *self.down.tolist()]
        position = self.origin + z * self.gap * np.cross(self.across, self.down)
        ds.ImagePositionPatient = [f"{v:.6f}" for v in position]
        ds.PixelSpacing, ds.Rows, ds.Columns = list(self.spacing), *plane.shape
        ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PixelRepresentation = 1, "MONOCHROME2", 1
        ds.BitsAllocated, ds.BitsStored, ds.HighBit = 16, 16, 15
        ds.PixelData = plane.astype("<i2").tobytes()
        for key, value in extra.items():
            setattr(ds, key, value)
        buffer = io.BytesIO()
        ds.save_as(buffer, enforce_file_format=True)
        return buffer.getvalue()


@pytest.fixture
def slices() -> Slices:
    return Slices()


CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: What the tests themselves provoke: files refused, cases removed, a second window's conflict, events cut off.
EXPECTED = ("400", "404", "409", "507", "net::ERR_FAILED")
TIMEOUT = 90_000  # milliseconds: a busy machine without a GPU draws slowly
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    reason = "playwright is not installed: pip install 'pclmix[dev]'"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    os.environ.setdefault("PCLMIX_CACHE", str(tmp_path_factory.mktemp("cache")))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Open a URL and wait for the first slice; console errors fail the test."""
    complaints: list[str] = []
    context = chromium.new_context(viewport={"width": 1200, "height": 800}, has_touch=True)
    context.set_default_timeout(TIMEOUT)

    def listen(message: Any) -> None:
        if message.type == "error" and not any(known in message.text for known in EXPECTED):
            complaints.append(message.text)

    def start(url: str, ready: str = "body[data-ready]", hold: str | None = None) -> Any:
        """`hold` is a URL whose response is delayed until the test calls `page.release()`."""
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", listen)
        if hold:
            held: list[Any] = []
            page.route(hold, lambda route: held.append(route))
            page.release = lambda: [route.continue_() for route in held]
        page.goto(url)
        page.wait_for_selector(ready)
        return page

    yield start
    context.close()
    assert not complaints


@pytest.fixture
def affine_of() -> Callable[[str], np.ndarray]:
    def make(code: str) -> np.ndarray:
        """Voxel axes x, y, z running towards the directions of a code such as LPS or AIR."""
        direction = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}
        affine = np.eye(4)
        affine[:3, :3] = 0
        for column, letter in enumerate(code):
            row, sign = direction[letter]
            affine[row, column] = sign * (1.5, 1.5, 6)[column]
        affine[:3, 3] = (11, -7, 5)
        return affine

    return make

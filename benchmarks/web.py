"""Speed of the workbench: showing a case, saving a stroke and scrolling.

    python benchmarks/web.py DATASET [--cases 5] [--strokes 50] [--slices 300]

A few cases of DATASET are copied, since strokes are saved. The time of a save is the server's own, from the
request's arrival to the last byte of the answer, including the sync to disk. Times on the screen are the
browser's own clock in headless Chromium, which draws in software here: "page" from the navigation to the first slice on
the screen, everything loaded anew; "ready" from the navigation until one can draw on it; "case" from choosing another
case until one can draw on it. "scroll" is the time between two frames of the page while the wheel turns by one slice in
each frame, through a volume of 512 x 512 x SLICES in the axial plane; "planes" the same with three planes shown.
Written to results/web/web.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import uvicorn

from pclmix.data.dataset import Dataset, write_dataset_json
from pclmix.io.files import write_json
from pclmix.labels import Labels
from pclmix.web.serve import create_app

RESULT = Path(__file__).parents[1] / "results" / "web" / "web.json"
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


class Clock:
    """ASGI middleware that notes how long each save took."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.saves: list[float] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started = time.perf_counter()
        await self.app(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith("/strokes"):
            self.saves.append((time.perf_counter() - started) * 1000)


def copy_some(source: Dataset, target: Path, count: int) -> list[str]:
    cases = list(source.cases[:count])
    for case in cases:
        for path in (*source.image_paths(case), source.scribble_path(case)):
            copy = target / path.relative_to(source.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    write_dataset_json(
        target, channels=source.channels, labels=source.labels, ending=source.ending, cases=len(cases), name="benchmark"
    )
    return cases


def start(clock: Clock) -> tuple[uvicorn.Server, str]:
    server = uvicorn.Server(uvicorn.Config(clock, port=0, log_level="warning", timeout_graceful_shutdown=1))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def save_strokes(url: str, case: str, count: int) -> None:
    """A stroke is a few short runs in one slice, as a pen leaves them."""
    with httpx.Client(base_url=url, headers={"x-pclmix": "1"}) as client:
        found = client.get(f"/api/cases/{case}/strokes")
        version = found.headers["x-version"]
        _, height, width = map(int, found.headers["x-shape"].split(","))
        for number in range(count):
            first = (number % (height // 2)) * width
            body = {"version": version, "runs": [[first + row * width + row, 3, 1] for row in range(20)]}
            version = client.post(f"/api/cases/{case}/strokes", json=body).raise_for_status().json()["version"]


def look(url: str, cases: list[str]) -> dict[str, list[float]]:
    """Milliseconds: page loaded anew to its first slice, and to the first stroke; each other case in the same page."""
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {"page": [], "ready": [], "case": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for case in cases:
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            page.goto(f"{url}/?case={case}")
            page.wait_for_selector("body[data-predicted]", state="attached")
            page.wait_for_timeout(1500)
            shown = (
                "() => { const of = (name) => performance.getEntriesByName(name)[0]; "
                "const slice = of('first slice') ?? of('case'); "  # painted by hand, or the viewer's own
                "return Math.max(slice.startTime + slice.duration, of('first-contentful-paint').startTime) }"
            )
            times["page"].append(page.evaluate(shown))
            ready = "() => { const m = performance.getEntriesByName('case')[0]; return m.startTime + m.duration }"
            times["ready"].append(page.evaluate(ready))
            for other in (c for c in cases if c != case):
                page.locator("#cases button", has_text=other).click()
                page.wait_for_selector(f"body[data-ready='{other}']")
                page.wait_for_timeout(500)
            lasts = "() => performance.getEntriesByName('case').slice(1).map((m) => m.duration)"
            times["case"] += page.evaluate(lasts)
            page.context.close()
        browser.close()
    return times


def make_volume(root: Path, slices: int) -> str:
    """A dataset of one CT-like volume of 512 x 512 x `slices` with a ring, a disc and noise; returns the case."""
    y, x = np.mgrid[:512, :512]
    radius = np.hypot(y - 256, x - 256)
    rng = np.random.default_rng(0)
    image = np.empty((512, 512, slices), np.int16)
    for z in range(slices):
        body = np.where(radius < 200, 40, -1000) + 200 * (radius < 60 + 20 * np.sin(z / 20))
        image[..., z] = body + rng.normal(0, 20, body.shape)
    scribble = np.full(image.shape, 2, np.uint8)
    scribble[200:300, 256, ::10] = 1
    scribble[100:400, 80, ::10] = 0
    for folder, name, data in (("imagesTr", "volume_0000", image), ("labelsTr", "volume", scribble)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(data, np.diag([0.8, 0.8, 1.5, 1.0])), root / folder / f"{name}.nii.gz")
    labels = Labels(("background", "disc"), ignore=2)
    write_dataset_json(root, channels=("CT",), labels=labels, ending=".nii.gz", cases=1, name="scroll")
    return "volume"


TURN = """([count, warm]) => new Promise((resolve) => {
  const canvas = document.getElementById('canvas'), box = canvas.getBoundingClientRect(), times = [];
  const at = { clientX: box.left + box.width / 4, clientY: box.top + box.height / 4, bubbles: true, cancelable: true };
  const turn = (now) => {
    times.push(now);
    if (times.length > count + warm) { resolve(times.slice(warm)); return; }
    const down = Math.floor(times.length / 100) % 2 ? -1 : 1;
    canvas.dispatchEvent(new WheelEvent('wheel', { ...at, deltaY: 100 * down }));
    requestAnimationFrame(turn);
  };
  requestAnimationFrame(turn);
})"""


def scroll(url: str, case: str, *, planes: bool, frames: int = 240) -> list[float]:
    """Milliseconds between frames while each frame shows the next slice."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        page.add_init_script(f"localStorage.setItem('pclmix.planes', '{3 if planes else 1}')")
        page.goto(f"{url}/?case={case}&slice=100")
        page.wait_for_selector(f"body[data-ready='{case}']", timeout=120_000)
        page.wait_for_timeout(3000)
        before = page.evaluate("() => document.getElementById('slices').ariaValueText")
        shown = page.evaluate(TURN, [frames, 20])
        after = page.evaluate("() => document.getElementById('slices').ariaValueText")
        if before == after:
            raise SystemExit(f"the wheel did not change the slice: {before}")
        browser.close()
    return [second - first for first, second in pairwise(shown)]


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
        "count": len(ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--cases", type=int, default=5)
    parser.add_argument("--strokes", type=int, default=50)
    parser.add_argument("--slices", type=int, default=300, help="of the volume that is scrolled")
    arguments = parser.parse_args()
    source = Dataset.open(arguments.dataset)
    with tempfile.TemporaryDirectory() as folder:
        cases = copy_some(source, Path(folder), arguments.cases)
        shapes = [list(source.read_scribble(case)[0].shape) for case in cases]
        clock = Clock(create_app(Path(folder)))
        server, url = start(clock)
        save_strokes(url, cases[0], arguments.strokes)
        times = {"save": clock.saves}
        if shutil.which("chromium"):
            times |= look(url, cases)
        server.should_exit = True
    if shutil.which("chromium"):
        with tempfile.TemporaryDirectory() as folder:
            case = make_volume(Path(folder), arguments.slices)
            server, url = start(Clock(create_app(Path(folder))))
            times["scroll"] = scroll(url, case, planes=False)
            times["planes"] = scroll(url, case, planes=True)
            server.should_exit = True
    found = {name: summary(values) for name, values in times.items()}
    for name, row in found.items():
        print(f"{name:6} median {row['median_ms']:.1f} ms, 95 % within {row['p95_ms']:.1f} ms, {row['count']} times")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    load = f"load {os.getloadavg()[0]:.1f} when it ended"
    write_json(
        RESULT,
        {
            "dataset": source.name,
            "shapes_zhw": shapes,
            "machine": machine,
            "others": load,
            "drawn_by": "SwiftShader",
            "scrolled": [512, 512, arguments.slices],
            **found,
        },
    )
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()

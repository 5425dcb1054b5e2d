"""The page in a real browser: orientation, colours, failures, new images, suggestions, themes.

Skipped where Chromium or playwright is not installed.
"""

from __future__ import annotations

import json
import re
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from browsing import drop, labels_of, one_voxel, picture, pictures, place_of, predict_by_hand, stroke, wait_saved
from PIL import Image

from pclmix.data.dataset import Dataset
from pclmix.web.workspace import make_dataset

pytestmark = pytest.mark.xdist_group("browser")


def letters(page: Any) -> list[tuple[str, float, float]]:
    read = "nodes => nodes.map(n => [n.textContent, Number(n.getAttribute('x')), Number(n.getAttribute('y'))])"
    return [tuple(found) for found in page.eval_on_selector_all("#hud .side", read)]


@pytest.mark.parametrize("code", ["RAS", "LPS", "PIR", "ASL", "LIA"])
def test_orientation_letters_match_the_affine(code, tmp_path, serve, open_page, affine_of):
    """A bright voxel far towards one side of the patient appears near the letter of that side."""
    affine, shape, bright = affine_of(code), (5, 30, 30), (2, 3, 27)
    one_voxel(tmp_path / "set", affine, shape, bright)
    page = open_page(serve(tmp_path / "set").url)
    found = letters(page)
    assert len(found) == 4
    assert float(page.eval_on_selector("#hud .side", "n => parseFloat(getComputedStyle(n).fontSize)")) >= 16
    grey, box = picture(page)
    x, y = place_of(grey.min(axis=2) > 200, [0, 0, box["width"], box["height"]])
    middle = affine @ [*(np.array(shape[::-1]) - 1) / 2, 1]
    towards = (affine @ [*bright[::-1], 1] - middle)[:3]
    for axis, (low, high) in enumerate((("L", "R"), ("P", "A"), ("I", "S"))):
        if abs(towards[axis]) < 1:
            assert not {low, high} & {letter for letter, *_ in found}
            continue
        near, far = (high, low) if towards[axis] > 0 else (low, high)
        distance = {letter: np.hypot(lx - x, ly - y) for letter, lx, ly in found}
        assert distance[near] < distance[far], (near, found)


def test_no_letters_for_unknown_orientation(tmp_path, serve, open_page):
    one_voxel(tmp_path / "set", np.eye(4), (5, 9, 12), (2, 2, 2))
    path = tmp_path / "set" / "imagesTr" / "case_0000.nii.gz"
    image = nib.load(path)
    data = np.asarray(image.dataobj).copy()
    bare = nib.Nifti1Image(data, None)
    bare.set_sform(None, 0)
    bare.set_qform(None, 0)
    nib.save(bare, path)
    page = open_page(serve(tmp_path / "set").url)
    assert letters(page) == []
    assert page.locator("#mirror").is_hidden()
    assert page.locator("#corner").inner_text() == "Slice 3 of 5"


def test_pictures_in_colour_without_letters_or_slices(tmp_path, serve, open_page):
    page = open_page(serve(pictures(tmp_path / "set")).url)
    assert letters(page) == []
    assert page.locator("#corner").inner_text() == ""
    assert page.locator("#slices").is_hidden()
    assert page.locator("#mirror").is_hidden()
    shot, box = picture(page)
    at = lambda fx, fy: shot[int(fy * box["height"]), int(fx * box["width"])].tolist()  # noqa: E731
    assert (
        np.abs(np.array([at(0.3, 0.35), at(0.7, 0.35), at(0.3, 0.65)]) - [[200, 0, 0], [0, 150, 0], [200, 0, 90]]).max()
        < 6
    )
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.35 * box["height"])
    assert "RGB 0, 150, 0" in page.locator("#readout").inner_text()
    page.mouse.move(5, 5)
    page.locator("#channel").select_option("green")
    page.wait_for_timeout(800)
    shot, _ = picture(page)
    assert np.ptp(shot, axis=2).max() <= 12  # grey
    assert at(0.7, 0.35)[0] > at(0.3, 0.35)[0] + 100
    thumbnail = page.locator("#cases img").first
    thumbnail.evaluate(
        "async image => { while (!image.complete || !image.naturalWidth) await new Promise(requestAnimationFrame) }"
    )
    middle = thumbnail.evaluate(
        "image => { const c = document.createElement('canvas'), g = c.getContext('2d'); c.width = c.height = 9;"
        " g.drawImage(image, 0, 0, 9, 9); return Array.from(g.getImageData(1, 2, 1, 1).data) }"
    )
    assert middle[0] > 150 > 60 > middle[1]


@pytest.mark.parametrize(("shape", "pen"), [((1800, 2400), (10, 16)), ((512, 640), (3, 3))])
def test_thin_strokes_are_visible_on_large_pictures(tmp_path, serve, open_page, shape, pen):
    """A line of one image pixel is drawn wider, and a new stroke is shown at once."""
    (height, width), root = shape, pictures(tmp_path / "set", shape, 1)
    labels = np.full(shape, 3, np.uint8)
    labels[height // 2 + 1, width // 4 : 3 * width // 4] = 1
    Image.fromarray(labels).save(root / "labelsTr" / "photo1.png")
    page = open_page(serve(root).url)
    shot, box = picture(page)
    at = lambda fx, fy: shot[int(fy * box["height"]), int(fx * box["width"])].tolist()  # noqa: E731
    colours = [at(0.3, 0.35), at(0.7, 0.35), at(0.3, 0.65)]
    assert np.abs(np.array(colours) - [[200, 0, 0], [0, 150, 0], [200, 0, 90]]).max() < 6  # upright and in colour

    def seen(shot: np.ndarray, at: float, colour: list[int]) -> np.ndarray:
        """Rows near a height on which a colour covers the middle of the picture."""
        around = shot[int(at * box["height"]) - 12 : int(at * box["height"]) + 12, int(0.42 * box["width"]) :]
        alike = np.abs(around[:, : int(0.16 * box["width"])] - colour).max(axis=2) < 60
        return alike.mean(axis=1) > 0.98

    assert seen(shot, 0.5, [86, 180, 233]).sum() >= 2
    page.keyboard.press("2")
    line = [(box["x"] + x * box["width"], box["y"] + 0.35 * box["height"]) for x in (0.35, 0.65)]
    stroke(page, line)
    wait_saved(page)
    drawn = np.asarray(Image.open(root / "labelsTr" / "photo1.png")) == 2
    assert 0.2 * height < np.nonzero(drawn)[0].mean() < 0.42 * height
    assert pen[0] <= drawn.sum(axis=0).max() <= pen[1]
    page.mouse.move(5, 5)
    page.wait_for_timeout(300)
    assert seen(picture(page)[0], 0.35, [230, 159, 0]).sum() >= 2


def test_failed_save_is_shown_until_resolved(dataset, serve, open_page):
    page = open_page(f"{serve(dataset).url}/?case=case1")
    before = labels_of(dataset, "case1")
    problem = {"status": 507, "json": {"error": "the disk that holds the dataset is full; free some space"}}
    page.route(
        "**/case1/strokes",
        lambda route: route.fulfill(**problem) if route.request.method == "POST" else route.continue_(),
    )
    box = page.locator("#canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    notice = page.locator("#alert")
    notice.wait_for()
    text = notice.inner_text()
    assert "not saved" in text
    assert "The disk that holds the dataset is full; free some space." in text
    assert notice.get_attribute("role") == "alert"
    page.wait_for_timeout(4000)  # tried again meanwhile, and still there
    assert notice.is_visible()
    page.keyboard.press("ArrowRight")  # one cannot leave the case and lose them
    page.wait_for_timeout(500)
    assert page.locator("#case-name").inner_text() == "case1"
    assert np.array_equal(labels_of(dataset, "case1"), before)
    page.unroute("**/case1/strokes")
    page.route("**/case1/strokes", lambda route: route.abort() if route.request.method == "POST" else route.continue_())
    notice.get_by_role("button").click()
    notice.filter(has_text="does not respond").wait_for()
    page.unroute("**/case1/strokes")
    notice.get_by_role("button").click()
    notice.wait_for(state="hidden")
    wait_saved(page)
    assert not np.array_equal(labels_of(dataset, "case1"), before)
    message = "internal error (KeyError); the terminal of pclmix serve shows the traceback"
    page.evaluate("p => import('./dialogs.js').then((d) => d.alarm(p))", {"message": message, "status": 500})
    assert notice.inner_text().count("terminal") == 1


def test_a_stroke_ends_when_a_notice_moves_the_image(tmp_path, serve, open_page):
    root, shape = tmp_path / "set", (1, 120, 160)
    one_voxel(root, np.eye(4), shape, (0, 0, 0))
    page = open_page(serve(root).url)
    box = page.locator("#canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.locator("#pen").fill("1")
    page.mouse.move(x - 60, y)
    page.mouse.down()
    page.mouse.move(x, y, steps=5)
    page.evaluate("import('./dialogs.js').then((d) => d.alarm({ message: 'the disk is full', status: 507 }, () => {}))")
    page.wait_for_function("h => document.getElementById('canvas').clientHeight < h", arg=box["height"] - 20)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.mouse.move(x + 60, y, steps=5)
    page.mouse.up()
    wait_saved(page)
    rows, columns = np.nonzero(labels_of(root, "case")[0] == 1)
    assert len(rows)
    assert len(set(rows)) == 1
    assert columns.min() >= shape[2] // 2 - 1  # columns run towards the right of the patient, on the left


def test_first_picture_sets_the_type_of_an_empty_dataset(tmp_path, serve, open_page):
    root, dropped = tmp_path / "set", tmp_path / "dropped"
    make_dataset(root, ["one", "two"])
    dropped.mkdir()
    for name, shape in (("first", (40, 50, 3)), ("second", (44, 30, 3)), ("grey", (20, 20))):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)).save(dropped / f"{name}.png")
    page = open_page(serve(root).url, ready="#empty:not([hidden])")
    drop(page, dropped / "first.png")
    page.wait_for_selector("body[data-ready=first]")
    made = Dataset.open(root)
    assert (made.ending, made.channels, made.cases) == (".png", ("red", "green", "blue"), ("first",))
    assert page.locator("#slices").is_hidden()
    drop(page, dropped / "second.png")
    page.wait_for_selector("body[data-ready=second]")  # what is new is opened
    page.keyboard.press("1")
    box = page.locator("#canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    wait_saved(page)
    assert (np.asarray(Image.open(root / "labelsTr" / "second.png")) == 1).any()
    drop(page, dropped / "grey.png")
    page.locator("#toasts", has_text="3 needed").wait_for()
    assert Dataset.open(root).cases == ("first", "second")


def test_suggestions_are_distinct_places_with_reasons(tmp_path, serve, open_page):
    root, shape = tmp_path / "set", (6, 80, 100)
    one_voxel(root, np.diag([1.0, 1.0, 5, 1.0]), shape, (3, 40, 50))
    doubt, labels = np.zeros(shape), np.zeros(shape)
    doubt[1, 20:30, 60:72], doubt[2, 20:30, 60:72], doubt[4, 50:56, 20:28] = 1, 0.9, 0.8
    doubt[:, 0:3], doubt[:, :, 0:3] = 1, 1  # as networks doubt the edge of an image
    predict_by_hand(root, "case", labels, doubt)
    page = open_page(serve(root).url)
    buttons = page.locator(".places button")
    buttons.first.wait_for()
    texts = buttons.all_inner_texts()
    assert [int(re.search(r"Slice (\d+)", text)[1]) for text in texts] == [2, 5]
    assert all("background or one" in text and re.search("[mc]m²", text) for text in texts)
    assert all("no strokes" in text for text in texts)
    assert ["anterior" in text for text in texts] == [False, True]  # rows run towards anterior, columns to the right
    assert [re.search(r"right|left", text)[0] for text in texts] == ["right", "left"]
    buttons.nth(1).click()
    page.wait_for_timeout(500)
    assert page.locator("#corner").inner_text() == "Slice 5 of 6"
    ring, canvas = (page.locator(k).bounding_box() for k in ("#place", "#canvas"))
    for at, size in (("x", "width"), ("y", "height")):
        assert abs(ring[at] + ring[size] / 2 - canvas[at] - canvas[size] / 2) < 12
    page.mouse.move(canvas["x"] + canvas["width"] / 2, canvas["y"] + canvas["height"] / 2)
    x, y, z = map(int, re.search(r"voxel (\d+), (\d+), (\d+)", page.locator("#readout").inner_text()).groups())
    assert z == 5
    assert 18 <= x <= 30
    assert 48 <= y <= 58


def test_suggestions_on_pictures_say_where(tmp_path, serve, open_page):
    root = pictures(tmp_path / "set", (80, 120), 1)
    doubt = np.zeros((1, 80, 120))
    doubt[0, 15:25, 90:102], doubt[0, 35:45, 54:66], doubt[0, 58:66, 15:25] = 1, 0.9, 0.8
    predict_by_hand(root, "photo1", np.zeros((1, 80, 120)), doubt)
    page = open_page(serve(root).url)
    page.locator(".places button").first.wait_for()
    texts = page.locator(".places small").all_inner_texts()
    assert [text.split(";")[0] for text in texts] == ["upper right", "centre", "lower left"]


def test_overlays_do_not_hide_the_image(tmp_path, serve, open_page):
    """Uncertainty colours at most a tenth of the image; predicted regions are mostly outlined."""
    root, shape = tmp_path / "set", (3, 100, 100)
    one_voxel(root, np.eye(4), shape, (1, 50, 50))
    doubt = np.full(shape, 0.7) + np.linspace(0, 0.3, 100)
    predict_by_hand(root, "case", np.ones(shape), doubt)
    page = open_page(serve(root).url)
    page.wait_for_selector("body[data-predicted]:not([data-predicted=''])")
    page.mouse.move(5, 5)
    page.keyboard.press("o")
    page.wait_for_timeout(600)
    bare, _ = picture(page)
    page.keyboard.press("u")
    page.wait_for_timeout(900)
    doubted = np.abs(picture(page)[0] - bare).max(axis=2) > 25
    assert 0.01 < doubted.mean() < 0.12
    page.keyboard.press("u")
    page.keyboard.press("o")
    page.wait_for_timeout(900)
    change = np.abs(picture(page)[0] - bare).max(axis=2)
    image = bare.max(axis=2) >= 0
    assert np.median(change[image]) < 80
    assert (change > 90).mean() > 0.005


JOB = {
    "id": "20200101-000000", "status": "running", "message": "", "kind": "train", "method": "pce", "recipe": "tiny",
    "seconds": None, "run": "20200101-000000", "started": 0, "done": 0, "total": 1, "cases": [], "step": 5, "curve": [],
    "resumable": False, "then": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "words", "value"),
    [
        ({"phase": "preparing", "share": 0, "left": None}, "Preparing", None),
        ({"phase": "training", "share": 0.4, "left": 95}, "Training: 40 %, about 2 min left", "0.4"),
        (
            {"phase": "training", "share": 0.5, "left": None, "start": "2020"},
            "Training from the last model: 50 %",
            "0.5",
        ),
        ({"phase": "finishing", "share": 1, "left": 0}, "Finishing", None),
        ({"phase": "predicting", "share": 1, "left": 0}, "Predicting: 0 of 1", "0"),
    ],
)
def test_training_phases_on_the_page(dataset, serve, open_page, state, words, value):
    def answer(route: Any) -> None:
        route.fulfill(body=json.dumps({"job": {**JOB, **state}, "runs": []}), content_type="application/json")

    url = serve(dataset).url
    page = open_page(url)
    page.route("**/api/jobs", answer)
    page.route("**/api/events", lambda route: route.abort())
    page.reload()
    page.locator("#job-text").filter(has_text=words).wait_for()
    assert page.locator("#job progress").get_attribute("value") == value
    current = page.locator(".steps [aria-current=step]").inner_text()
    assert words.startswith(current[:5])


def test_light_and_dark(dataset, serve, open_page):
    page = open_page(serve(dataset).url)
    shade = "() => getComputedStyle(document.querySelector('#side')).backgroundColor.match(/\\d+/g).map(Number)"
    for scheme, light in (("light", True), ("dark", False)):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(200)
        assert (min(page.evaluate(shade)) > 200) == light
        strip = page.locator("#slices")
        assert strip.evaluate("c => c.getContext('2d').getImageData(6, c.height - 6, 1, 1).data[0]") > 200 or not light


CUT = """() => [...document.querySelectorAll('button, label, span, b, small, p, summary, h1, h3, output, #corner')]
  .filter((n) => n.textContent.trim() && n.offsetParent && n.id !== 'case-name' && n.id !== 'dataset-name')
  .filter((n) => {
    const style = getComputedStyle(n), box = n.getBoundingClientRect();
    const clipped = n.scrollWidth > n.clientWidth + 1 && style.overflowX !== 'visible' && style.display !== 'inline';
    const pane = n.closest('aside, header, dialog')?.getBoundingClientRect();
    return clipped || (pane && (box.right > pane.right + 1 || box.left < pane.left - 1));
  }).map((n) => n.outerHTML.slice(0, 120))"""


#: Options wider than their list when it is closed.
SELECTS = """() => [...document.querySelectorAll('select')].filter((list) => list.offsetParent).flatMap((list) => {
  const style = getComputedStyle(list), pen = document.createElement('canvas').getContext('2d');
  pen.font = style.font;
  const room = list.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 16;
  return [...list.options].map((o) => o.text).filter((text) => pen.measureText(text).width > room);
})"""


@pytest.mark.parametrize("width", [390, 1100, 1440, 2560])
def test_no_label_is_truncated(width, tmp_path, serve, open_page):
    root, shape = tmp_path / "set", (6, 80, 100)
    one_voxel(root, np.eye(4), shape, (3, 40, 50))
    about = (root / "dataset.json").read_text()
    (root / "dataset.json").write_text(about.replace('"two"', '"posterior horn"').replace('"one"', '"anterior horn"'))
    predict_by_hand(root, "case", np.ones(shape), np.random.default_rng(0).random(shape))
    page = open_page(serve(root).url)
    page.set_viewport_size({"width": width, "height": 900})
    page.locator(".places button").first.wait_for(state="attached")
    page.get_by_text("Settings").click()
    page.wait_for_timeout(600)
    assert page.evaluate(CUT) == []
    assert page.evaluate(SELECTS) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

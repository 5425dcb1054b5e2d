"""Three planes in a real browser on non-RAS grids: drawing in each, and the readout.

Skipped where Chromium or playwright is not installed.
"""

from __future__ import annotations

import re

import nibabel as nib
import numpy as np
import pytest
from browsing import labels_of, one_voxel, picture, pictures, place_of, predict_by_hand, tiles, wait_saved

pytestmark = pytest.mark.xdist_group("browser")
SHAPE, BRIGHT = (7, 9, 12), (2, 2, 8)  # Z, H, W; nowhere near a symmetry


def looks_at_bright_voxel(page, root) -> tuple[np.ndarray, dict[str, float]]:
    """Show three planes and click the bright voxel, located in the screenshot."""
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # from the middle slice, 4, to 2; the third is wanted
    page.keyboard.press("ArrowDown")
    page.keyboard.press("p")
    page.keyboard.press("x")
    page.wait_for_timeout(400)
    grey, box = picture(page)
    main = tiles(page)[0]
    x, y = place_of(grey.min(axis=2) > 200, main)
    page.mouse.click(box["x"] + x, box["y"] + y)
    page.mouse.move(5, 5)
    page.wait_for_timeout(400)
    return picture(page)


@pytest.mark.parametrize("code", ["RAS", "LPS", "PIR", "ASL"])
def test_drawing_in_each_plane_labels_the_voxel_shown(code, tmp_path, serve, open_page, affine_of):
    """Independent of the page's own geometry: the bright voxel is located in the screenshot of each plane."""
    one_voxel(tmp_path / "set", affine_of(code), SHAPE, BRIGHT)
    page = open_page(serve(tmp_path / "set").url)
    grey, box = looks_at_bright_voxel(page, tmp_path)
    page.locator("#pen").fill("1")
    boxes = tiles(page)
    assert len(boxes) == 3
    for plane, key in zip(boxes, ("2", "1", "0"), strict=True):
        x, y = place_of(grey.min(axis=2) > 200, plane)
        page.keyboard.press(key)
        page.mouse.click(box["x"] + x, box["y"] + y)
        wait_saved(page)
        labels = labels_of(tmp_path / "set", "case")
        assert np.argwhere(labels != 3).tolist() == [list(BRIGHT)], key
        assert labels[BRIGHT] == int(key)


def test_a_stroke_in_another_plane_crosses_slices(tmp_path, serve, open_page, affine_of):
    one_voxel(tmp_path / "set", affine_of("LPS"), SHAPE, BRIGHT)
    page = open_page(serve(tmp_path / "set").url)
    _, box = looks_at_bright_voxel(page, tmp_path)
    page.keyboard.press("1")
    page.locator("#pen").fill("1")
    coronal = tiles(page)[1]
    x, y = (box[k] + coronal[i] + coronal[i + 2] / 2 for i, k in enumerate("xy"))
    page.mouse.move(x, y - 60)
    page.mouse.down()
    page.mouse.move(x, y + 60, steps=8)
    page.mouse.up()
    wait_saved(page)
    drawn = np.argwhere(labels_of(tmp_path / "set", "case") == 1)
    assert len(set(drawn[:, 0])) >= 2
    assert len(set(drawn[:, 1])) == 1  # one row: the plane that was drawn in
    page.keyboard.press("Control+z")
    wait_saved(page)
    assert (labels_of(tmp_path / "set", "case") == 3).all()


def test_value_and_position_under_the_pointer(tmp_path, serve, open_page):
    """Position as nibabel computes it, on an oblique grid; value after scl_slope and scl_inter."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag([1.2, 0.9, 4])
    affine[:3, 3] = (-31, 12, 7)
    one_voxel(tmp_path / "set", affine, SHAPE, BRIGHT)
    values = rng.integers(-300, 900, SHAPE[::-1]).astype(np.int16)
    image = nib.Nifti1Image(values, affine)
    image.header.set_slope_inter(0.5, -20)
    path = tmp_path / "set" / "imagesTr" / "case_0000.nii.gz"
    nib.save(image, path)
    stored = nib.load(path)
    page = open_page(serve(tmp_path / "set").url)
    box = page.locator("#canvas").bounding_box()
    seen = set()
    for fx, fy in ((0.35, 0.3), (0.5, 0.6), (0.62, 0.45)):
        page.mouse.move(box["x"] + fx * box["width"], box["y"] + fy * box["height"])
        text = page.locator("#readout").inner_text()
        voxel = [int(v) - 1 for v in re.search(r"voxel (\d+), (\d+), (\d+)", text).groups()]
        said = [float(v) * (1 if k in "RAS" else -1) for k, v in re.findall(r"([RLAPSI]) ([\d.]+)", text)]
        assert np.allclose(said, (stored.affine @ [*voxel, 1])[:3], atol=0.06), text
        assert float(re.search(r"value (-?[\d.]+)", text)[1]) == pytest.approx(stored.dataobj[tuple(voxel)])
        seen.add(tuple(voxel))
    assert len(seen) == 3
    page.mouse.move(5, 5)
    assert page.locator("#readout").is_hidden()


@pytest.mark.parametrize("unit", ["mm", "micron"])
def test_millimetres_come_from_pixdim(unit, tmp_path, serve, open_page):
    """ACDC's own files have an sform of 1 mm; microscopes write micrometres."""
    one_voxel(tmp_path / "set", np.diag([-1.0, -1.0, 1.0, 1.0]), SHAPE, BRIGHT)
    path = tmp_path / "set" / "imagesTr" / "case_0000.nii.gz"
    image = nib.load(path)
    data = np.asarray(image.dataobj).copy()
    image.header["pixdim"][1:4] = 2, 2, 10
    image.header.set_xyzt_units(unit)
    made = nib.Nifti1Image(data, None, image.header)
    made.header.set_sform(np.diag([-1.0, -1.0, 1.0, 1.0]), code="aligned")
    made.header.set_qform(None, code="unknown")
    made.header["pixdim"][1:4] = 2, 2, 10
    nib.save(made, path)
    page = open_page(serve(tmp_path / "set").url)
    factor = 1.0 if unit == "mm" else 0.001
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.6 * box["height"])
    text = page.locator("#readout").inner_text()
    voxel = np.array([int(v) - 1 for v in re.search(r"voxel (\d+), (\d+), (\d+)", text).groups()])
    said = [float(v) * (1 if k in "RAS" else -1) for k, v in re.findall(r"([RLAPSI]) ([\d.]+)", text)]
    assert np.allclose(said, voxel * [-2, -2, 10] * np.float64(factor), atol=0.06 * factor), text
    bar = page.locator("#hud .bar")
    pixels, length = (float(bar.get_attribute(f"data-{k}")) for k in ("pixels", "mm"))
    width = min(box["width"] / SHAPE[2], box["height"] / SHAPE[1])  # of a voxel on the screen
    assert pixels / length == pytest.approx(width / (2 * factor), rel=0.02)


@pytest.mark.parametrize("code", ["LPS", "PIR"])
def test_images_above_the_limit_of_3d_textures(code, tmp_path, serve, open_page, affine_of):
    """2,100 voxels in a row: turned to the patient's sides, one slice at a time, strokes and uncertainty in place."""
    root, shape = tmp_path / "set", (3, 50, 2100)
    affine = affine_of(code) @ np.diag([0.02, 1, 1, 1])
    one_voxel(root, affine, shape, (1, 5, 5))
    image = np.zeros(shape[::-1], np.int16)
    image[1400:1700, 8:14, 1] = 1000
    nib.save(nib.Nifti1Image(image, affine), root / "imagesTr" / "case_0000.nii.gz")
    doubt = np.zeros(shape)
    doubt[1, 30:40, 300:600] = 1
    predict_by_hand(root, "case", np.zeros(shape), doubt)
    page = open_page(serve(root).url)
    assert page.evaluate("document.getElementById('planes').hidden")
    page.wait_for_selector("body[data-predicted]:not([data-predicted=''])")
    grey, box = picture(page)
    whole = [0, 0, box["width"], box["height"]]
    x, y = place_of(grey.min(axis=2) > 200, whole)
    page.keyboard.press("2")
    page.locator("#pen").fill("1")
    page.mouse.click(box["x"] + x, box["y"] + y)
    wait_saved(page)
    z, rows, columns = np.nonzero(labels_of(root, "case") == 2)
    assert len(z)
    assert set(z) == {1}
    assert (rows.min() >= 8, rows.max() < 14, columns.min() >= 1400, columns.max() < 1700) == (True,) * 4
    page.mouse.move(5, 5)
    page.keyboard.press("u")
    page.wait_for_timeout(800)
    shot, _ = picture(page)
    assert np.ptp(shot[int(y), int(x)]) > 60  # the stroke is shown
    pink = (shot[:, :, 0] - shot[:, :, 1] > 40) & (shot[:, :, 2] - shot[:, :, 1] > 30)
    px, py = place_of(pink, whole)
    page.mouse.move(box["x"] + px, box["y"] + py)
    column, row = map(int, re.search(r"voxel (\d+), (\d+)", page.locator("#readout").text_content()).groups())
    assert 300 <= column <= 600
    assert 30 <= row <= 40
    page.keyboard.press("ArrowDown")
    page.mouse.move(5, 5)
    page.wait_for_timeout(300)
    assert not (picture(page)[0].min(axis=2) > 200).any()  # the next slice is empty


def test_scale_bar_length(tmp_path, serve, open_page):
    """Two bright columns 60 mm apart have that distance by the scale bar."""
    root = tmp_path / "set"
    one_voxel(root, np.diag([1.5, 1.5, 6, 1.0]), (5, 60, 60), (2, 0, 0))
    image = np.zeros((60, 60, 5), np.int16)
    image[[10, 50]] = 1000
    nib.save(nib.Nifti1Image(image, np.diag([1.5, 1.5, 6, 1.0])), root / "imagesTr" / "case_0000.nii.gz")
    page = open_page(serve(root).url)
    for _ in range(2):
        page.wait_for_timeout(300)
        grey, _ = picture(page)
        columns = np.flatnonzero((grey.min(axis=2) > 150).mean(axis=0) > 0.5)
        gap = np.argmax(np.diff(columns))
        first, last = columns[: gap + 1].mean(), columns[gap + 1 :].mean()
        bar = page.locator("#hud .bar")
        pixels, length = (float(bar.get_attribute(f"data-{k}")) for k in ("pixels", "mm"))
        assert (last - first) / 60 == pytest.approx(pixels / length, rel=0.02)
        page.keyboard.press("+")
        page.keyboard.press("-")
        page.keyboard.press("+")


@pytest.mark.parametrize("channel", ["CT", "image"])
def test_ct_presets(channel, tmp_path, serve, open_page):
    """The lung window shows -600 HU as middle grey, also without the channel's name; the choice is kept."""
    root = tmp_path / "set"
    one_voxel(root, np.eye(4), (5, 40, 40), (2, 0, 0))
    table = (root / "dataset.json").read_text().replace('"MRI"', f'"{channel}"')
    (root / "dataset.json").write_text(table)
    image = np.full((40, 40, 5), -1000, np.int16)
    image[10:30, 10:30], image[18:22, 18:22] = -600, 1500
    nib.save(nib.Nifti1Image(image, np.eye(4)), root / "imagesTr" / "case_0000.nii.gz")
    page = open_page(serve(root).url)
    for _ in range(2):
        if not _:
            page.locator("#preset").select_option("Lung")
        page.wait_for_timeout(400)
        grey, box = picture(page)
        middle = grey[int(box["height"] * 0.35), int(box["width"] * 0.5)]
        assert np.abs(middle - 127).max() <= 3
        assert (page.locator("#level").input_value(), page.locator("#width").input_value()) == ("-600", "1500")
        page.reload()
        page.wait_for_selector("body[data-ready]")
    page.locator("#width").fill("-5")
    page.locator("#width").press("Enter")
    assert page.locator("#width").input_value() == "1500"  # a width below 0 is no window
    page.locator("#width").fill("400")
    page.locator("#width").press("Enter")
    assert page.locator("#preset").input_value() == "Custom"
    page.locator("#reset-window").click()
    assert page.locator("#preset").input_value() == "Automatic"


OVERLAPS = """(selector) => {
  const texts = [...document.querySelectorAll(selector)].map((n) => [n.textContent, n.getBoundingClientRect()]);
  return texts.flatMap(([one, a], i) => texts.slice(i + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(([other]) => `${one} / ${other}`));
}"""


#: Whether the four letters of one plane are where the size of the canvas puts them.
AT_THE_EDGES = """() => {
  const sides = [...document.querySelectorAll("#hud .side")], box = document.getElementById("canvas");
  const most = (name) => Math.max(...sides.map((n) => Number(n.getAttribute(name))));
  const ends = [most("x") - box.clientWidth, most("y") - box.clientHeight];
  return sides.length === 4 && ends.every((end) => Math.abs(end + 16) < 2);
}"""


@pytest.mark.parametrize("width", [390, 1000, 1100, 1440])
def test_titles_and_toasts_leave_the_letters_readable(width, tmp_path, serve, open_page):
    one_voxel(tmp_path / "set", np.diag([1.0, 1.0, 20.0, 1.0]), (12, 300, 300), (2, 2, 2))
    page = open_page(serve(tmp_path / "set").url)
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function(AT_THE_EDGES)
    page.evaluate("import('./dialogs.js').then((d) => d.toast('Training has finished.', true))")
    page.locator("#toasts p").wait_for()
    assert page.evaluate(OVERLAPS, "#hud .side, #toasts p") == []
    page.keyboard.press("p")
    page.wait_for_function("document.querySelectorAll('#hud .tile').length === 3")
    assert page.locator("#hud .side").count() == 12
    assert page.evaluate(OVERLAPS, "#hud text") == []
    box = page.locator("#canvas").bounding_box()
    left, top, across, down = tiles(page)[0]
    page.mouse.move(box["x"] + left + across / 2, box["y"] + top + down / 2)
    page.locator("#readout").wait_for()
    assert page.evaluate(OVERLAPS, "#hud .note.middle, #readout") == []


def test_pictures_have_one_plane(tmp_path, serve, open_page):
    page = open_page(serve(pictures(tmp_path / "set")).url)
    assert page.locator("#planes").is_hidden()
    page.keyboard.press("p")
    assert page.locator("#hud .tile").count() == 0


def test_jumps_and_reloads_keep_the_plane_and_the_slice(dataset, serve, open_page):
    page = open_page(f"{serve(dataset).url}/?case=case1&slice=2")
    assert page.locator("#corner").inner_text() == "Slice 2 of 4"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.wait_for_timeout(500)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#corner").inner_text() == "Slice 4 of 4"
    page.keyboard.press("p")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert len(tiles(page)) == 3

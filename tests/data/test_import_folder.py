"""A folder of pictures or stacks as a dataset: any numbering, nothing guessed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pclmix.data.check import check
from pclmix.data.dataset import Dataset
from pclmix.data.importers import Options, import_dataset
from pclmix.errors import PclmixError


def pictures(root: Path, names: list[str], *, values: tuple[int, ...], nothing: int, suffix: str = "") -> Path:
    """Grey pictures with scribbles of `values`, one row each, and masks of 0, 1, ..."""
    rng = np.random.default_rng(0)
    for kind in ("images", "scribbles", "masks"):
        (root / kind).mkdir(parents=True)
    for name in names:
        scribble = np.full((8, 9), nothing, np.uint8)
        mask = np.zeros((8, 9), np.uint8)
        for k, value in enumerate(values):
            scribble[2 * k, 2:5] = value
            mask[2 * k : 2 * k + 2] = k
        Image.fromarray(rng.integers(0, 255, (8, 9), dtype=np.uint8)).save(root / "images" / f"{name}.png")
        Image.fromarray(scribble).save(root / "scribbles" / f"{name}{suffix}.png")
        Image.fromarray(mask).save(root / "masks" / f"{name}.png")
    return root


@pytest.mark.parametrize(
    ("values", "nothing", "options"),
    [
        ((0, 1, 2), 3, {}),
        ((0, 1, 2), 255, {}),
        ((1, 2, 3), 0, {"ignore": 0}),
        ((7, 1, 5), 0, {"ignore": 0, "classes": ("background=7", "lung=1", "heart=5")}),
        ((0, 1, 2), 9, {"classes": ("background", "lung", "heart")}),
    ],
)
def test_folder_of_pictures_with_any_numbering(values, nothing, options, tmp_path):
    root = pictures(tmp_path / "src", ["a", "b", "c"], values=values, nothing=nothing, suffix="_scribble")
    made, _ = import_dataset("folder", root, tmp_path / "out", Options(**options))
    assert made.labels.ignore == 3
    assert made.labels.names == (("background", "lung", "heart") if "classes" in options else ("background", "1", "2"))
    assert made.ending == ".png"
    report = check(made)
    assert report.findings == ()
    assert [share.cases for share in report.classes] == [3, 3, 3]
    assert made.image_paths("a")[0].read_bytes() == (root / "images" / "a.png").read_bytes()


def test_folder_does_not_guess(tmp_path, run):
    root = pictures(tmp_path / "src", ["a", "b"], values=(1, 2), nothing=0)
    result = run("import", "folder", root, tmp_path / "out")
    assert result.code == 2
    assert "say it with --ignore 0 or --ignore 2" in result.err
    gap = pictures(tmp_path / "gap", ["a"], values=(0, 5), nothing=255)
    result = run("import", "folder", gap, tmp_path / "out")
    assert result.code == 2
    assert "--classes background=VALUE" in result.err
    result = run("import", "folder", gap, tmp_path / "out", "--classes", "background=0,tumour=5")
    assert result.code == 0, result
    assert Dataset.open(tmp_path / "out").labels.names == ("background", "tumour")
    result = run("import", "folder", gap, tmp_path / "doubt", "--ignore", 9, "--classes", "background=0,a=5,b=255")
    assert result.code == 0, result
    assert "holds 9, 'nothing drawn': is --ignore right?" in result.err
    for classes in ("background,background", "background=x,a", "background=255,a", "a"):
        assert run("import", "folder", gap, tmp_path / "no", "--classes", classes).code == 2


def test_folder_names_that_end_in_numbers_are_cases_unless_the_scribble_says_channel(tmp_path):
    root = pictures(tmp_path / "one", ["img_0001", "img_0002"], values=(0, 1), nothing=2)
    made, _ = import_dataset("folder", root, tmp_path / "cases")
    assert made.cases == ("img_0001", "img_0002")
    assert len(made.channels) == 1

    root = pictures(tmp_path / "two", ["p", "q"], values=(0, 1), nothing=2)
    for path in list((root / "images").iterdir()):
        shutil.copyfile(path, path.with_name(f"{path.stem}_0001.png"))
        path.rename(path.with_name(f"{path.stem}_0000.png"))
    made, _ = import_dataset("folder", root, tmp_path / "channels")
    assert made.cases == ("p", "q")
    assert made.read_image("p").array.shape == (2, 1, 8, 9)
    (root / "images" / "q_0001.png").unlink()
    with pytest.raises(PclmixError, match=r"q_0000\.png: case 'q' has the channels 0; every case needs 0 to 1"):
        import_dataset("folder", root, tmp_path / "no")


def test_folder_of_colour_grey_and_palette_pictures(tmp_path):
    root = pictures(tmp_path / "colour", ["a", "b"], values=(0, 1), nothing=2)
    rng = np.random.default_rng(0)
    for path in (root / "images").iterdir():
        Image.fromarray(rng.integers(0, 255, (8, 9, 3), dtype=np.uint8)).save(path)
    labels = root / "scribbles" / "a.png"
    indices = Image.open(labels).copy()
    indices.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    indices.save(labels)
    made, _ = import_dataset("folder", root, tmp_path / "out")
    assert made.channels == ("R", "G", "B")
    assert made.read_image("a").array.shape == (3, 1, 8, 9)
    assert check(made).findings == ()

    grey = pictures(tmp_path / "grey", ["a"], values=(0, 1), nothing=2)
    path = grey / "images" / "a.png"
    plane = np.asarray(Image.open(path))
    Image.open(path).convert("RGB").save(path)
    made, _ = import_dataset("folder", grey, tmp_path / "grey_out")
    assert made.channels == ("image",)
    np.testing.assert_array_equal(np.asarray(Image.open(made.image_paths("a")[0])), plane)


def test_folder_of_tiff_stacks_keeps_the_spacing(tmp_path):
    import tifffile

    rng = np.random.default_rng(0)
    images, scribbles = tmp_path / "images", tmp_path / "drawn"
    images.mkdir()
    scribbles.mkdir()
    labels = np.full((5, 8, 9), 2, np.uint8)
    labels[:, 1], labels[:, 5] = 0, 1
    stack = rng.integers(0, 60000, (5, 8, 9), dtype=np.uint16)
    tifffile.imwrite(images / "a.tif", stack)
    tifffile.imwrite(scribbles / "a.tif", labels)
    (images / "a.json").write_text(json.dumps({"spacing": [4, 0.5, 0.5]}))
    made, _ = import_dataset("folder", images, tmp_path / "out", Options(scribbles=scribbles))
    assert made.read_image("a").geometry.spacing == (4, 0.5, 0.5)
    np.testing.assert_array_equal(made.read_image("a").array[0], stack)
    assert check(made).findings == ()


def test_folder_takes_labels_from_folders_below(tmp_path):
    root = pictures(tmp_path / "src", ["a", "b"], values=(0, 1), nothing=2)
    for name in ("a", "b"):
        (root / "scribbles" / name).mkdir()
        (root / "scribbles" / f"{name}.png").rename(root / "scribbles" / name / f"{name}_scribble.png")
    made, _ = import_dataset("folder", root, tmp_path / "out")
    assert made.cases == ("a", "b")


def test_folder_says_which_half_is_missing(tmp_path):
    root = pictures(tmp_path / "src", ["a", "bb"], values=(0, 1), nothing=2)
    (root / "scribbles" / "bb.png").unlink()
    with pytest.raises(PclmixError, match=r"bb\.png has no scribble named 'bb'.*pclmix scribble"):
        import_dataset("folder", root, tmp_path / "out")
    (root / "images" / "bb.png").unlink()
    (root / "images" / "a.png").unlink()
    with pytest.raises(PclmixError, match="holds no image files"):
        import_dataset("folder", root, tmp_path / "out")
    shutil.rmtree(root / "scribbles")
    with pytest.raises(PclmixError, match="no subfolder 'scribbles'; draw some from the masks"):
        import_dataset("folder", root, tmp_path / "out")

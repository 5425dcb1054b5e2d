"""Import of folders of pictures or stacks with any label values."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pclmix.data.check import check
from pclmix.data.dataset import Dataset
from pclmix.data.importers import Options, import_dataset
from pclmix.errors import PclmixError
from pclmix.io.volume import read_labels


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


def test_folder_asks_for_ambiguous_values(tmp_path, run):
    root = pictures(tmp_path / "src", ["a", "b"], values=(1, 2), nothing=0)
    result = run("import", "folder", root, tmp_path / "out")
    assert result.code == 2
    assert "--ignore 0 or --ignore 2" in result.err
    gap = pictures(tmp_path / "gap", ["a"], values=(0, 5), nothing=255)
    result = run("import", "folder", gap, tmp_path / "out")
    assert result.code == 2
    assert "--classes background=VALUE" in result.err
    result = run("import", "folder", gap, tmp_path / "out", "--classes", "background=0,tumour=5")
    assert result.code == 0, result
    assert Dataset.open(tmp_path / "out").labels.names == ("background", "tumour")
    result = run("import", "folder", gap, tmp_path / "doubt", "--ignore", 9, "--classes", "background=0,a=5,b=255")
    assert result.code == 0, result
    assert re.search(r"\b9\b.*--ignore", result.err)
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
    with pytest.raises(PclmixError, match=r"q_0000\.png.*'q'.*\b0 to 1\b"):
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


def test_photos_become_png_and_labels_are_none(tmp_path):
    root = pictures(tmp_path / "src", ["a", "b"], values=(0, 1), nothing=2)
    rng = np.random.default_rng(0)
    for path in list((root / "images").iterdir()):
        Image.fromarray(rng.integers(0, 255, (8, 9, 3), dtype=np.uint8)).save(path.with_suffix(".JPG"))
        path.unlink()
    made, _ = import_dataset("folder", root, tmp_path / "out")
    assert (made.ending, made.channels) == (".png", ("R", "G", "B"))
    pixels = np.asarray(Image.open(root / "images" / "a.JPG"))
    np.testing.assert_array_equal(np.asarray(Image.open(made.image_paths("a")[0])), pixels)
    assert check(made).findings == ()

    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels).save(root / "images" / "b.JPG", exif=turned)
    with pytest.raises(PclmixError, match=r"b\.JPG.*EXIF"):
        import_dataset("folder", root, tmp_path / "no")
    with pytest.raises(PclmixError, match="JPEG"):
        read_labels(root / "images" / "a.JPG")
    assert not (tmp_path / "no").exists()


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


@pytest.mark.parametrize("ending", [".png", ".tif"])
def test_a_picture_keeps_its_spacing_and_gets_no_other(tmp_path, ending):
    root = tmp_path / "src"
    labels = np.full((8, 9), 2, np.uint8)
    labels[1], labels[5] = 0, 1
    for kind in ("images", "scribbles", "masks"):
        (root / kind).mkdir(parents=True)
        for case in ("a", "b"):
            Image.fromarray(labels if kind != "masks" else labels % 2).save(root / kind / f"{case}{ending}")
    (root / "images" / "a.json").write_text(json.dumps({"spacing": [1, 0.5, 0.5]}))
    made, _ = import_dataset("folder", root, tmp_path / "out")
    assert (made.read_image("a").geometry.spacing, made.read_image("a").geometry.unit) == ((1, 0.5, 0.5), "mm")
    assert made.read_image("b").geometry.unit == "px"
    assert [read_labels(made.reference_path(case))[1].unit for case in ("a", "b")] == ["mm", "px"]
    assert [read_labels(made.scribble_path(case))[1].unit for case in ("a", "b")] == ["mm", "px"]
    assert check(made).findings == ()


def test_folder_takes_labels_from_folders_below(tmp_path):
    root = pictures(tmp_path / "src", ["a", "b"], values=(0, 1), nothing=2)
    for name in ("a", "b"):
        (root / "scribbles" / name).mkdir()
        (root / "scribbles" / f"{name}.png").rename(root / "scribbles" / name / f"{name}_scribble.png")
    made, _ = import_dataset("folder", root, tmp_path / "out")
    assert made.cases == ("a", "b")


def test_a_folder_for_each_case(tmp_path):
    flat = pictures(tmp_path / "flat", ["a", "b"], values=(0, 1), nothing=2)
    tree, drawn = tmp_path / "tree", tmp_path / "drawn"
    for case in ("a", "b"):
        for target, source in (
            (tree / f"case_{case}" / "image.png", "images"),
            (tree / f"case_{case}" / "seg.png", "masks"),
            (drawn / f"case_{case}" / "scribble.png", "scribbles"),
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(flat / source / f"{case}.png", target)
    made, _ = import_dataset("folder", tree, tmp_path / "out", Options(scribbles=drawn, masks=tree))
    assert made.cases == ("case_a", "case_b")
    assert all(made.has_reference(case) for case in made.cases)
    for case in ("a", "b"):  # all files of a case in one folder
        shutil.copyfile(drawn / f"case_{case}" / "scribble.png", tree / f"case_{case}" / "scribble.png")
    again, _ = import_dataset("folder", tree, tmp_path / "again", Options(scribbles=tree, masks=tree))
    for case in made.cases:
        for one, other in (
            (made.scribble_path(case), again.scribble_path(case)),
            (made.reference_path(case), again.reference_path(case)),
        ):
            np.testing.assert_array_equal(read_labels(one)[0], read_labels(other)[0])
    bare, _ = import_dataset("folder", tree, tmp_path / "bare", Options(scribbles=tree))
    assert not bare.has_reference("case_a")
    assert made.image_paths("case_b")[0].read_bytes() == (flat / "images" / "b.png").read_bytes()
    shutil.copyfile(tree / "case_a" / "image.png", tree / "case_a" / "other.png")
    with pytest.raises(PclmixError, match="other"):
        import_dataset("folder", tree, tmp_path / "no", Options(scribbles=drawn))


def test_folder_reports_unmatched_files(tmp_path):
    root = pictures(tmp_path / "src", ["a", "bb"], values=(0, 1), nothing=2)
    (root / "scribbles" / "bb.png").unlink()
    with pytest.raises(PclmixError, match=r"bb\.png.*--skip-unmatched"):
        import_dataset("folder", root, tmp_path / "out")
    (root / "images" / "bb.png").unlink()
    (root / "images" / "a.png").unlink()
    with pytest.raises(PclmixError, match=str(root / "images")):
        import_dataset("folder", root, tmp_path / "out")
    shutil.rmtree(root / "scribbles")
    with pytest.raises(PclmixError, match="'scribbles'"):
        import_dataset("folder", root, tmp_path / "out")


def test_unmatched_files_are_listed_in_one_error_or_left_out(tmp_path, run):
    root = pictures(tmp_path / "src", [f"c{n}" for n in range(9)], values=(0, 1), nothing=2)
    for n in (1, 2):
        (root / "scribbles" / f"c{n}.png").unlink()
    (root / "images" / "c3.png").unlink()
    result = run("import", "folder", root, tmp_path / "out")
    assert result.code == 2
    for name in ("images/c1.png", "images/c2.png", "scribbles/c3.png", "--skip-unmatched"):
        assert name in result.err
    assert not (tmp_path / "out").exists()
    result = run("import", "folder", root, tmp_path / "out", "--skip-unmatched")
    assert result.code == 0
    assert "c1.png" in result.err
    assert "c3.png" in result.err
    assert Dataset.open(tmp_path / "out").cases == ("c0", "c4", "c5", "c6", "c7", "c8")
    for path in (root / "scribbles").iterdir():
        path.rename(path.with_name(f"other{path.name}"))
    assert run("import", "folder", root, tmp_path / "none", "--skip-unmatched").code == 2


def test_cases_without_a_scribble_may_be_labelled_by_their_mask(tmp_path, run):
    root = pictures(tmp_path / "src", ["a", "b", "c"], values=(0, 1), nothing=255)
    (root / "scribbles" / "b.png").unlink()
    refused = run("import", "folder", root, tmp_path / "no")
    assert refused.code == 2
    assert "--dense" in refused.err
    result = run("import", "folder", root, tmp_path / "out", "--dense")
    assert result.code == 0
    made = Dataset.open(tmp_path / "out")
    assert made.cases == ("a", "b", "c")
    labels = made.read_scribble("b")[0]
    np.testing.assert_array_equal(labels, made.read_reference("b")[0])
    assert (labels >= 0).all()
    assert (made.read_scribble("a")[0] < 0).any()
    assert check(made).errors == []


@pytest.mark.parametrize("channels", [1, 2])
def test_images_without_a_scribble_may_be_unlabelled_cases(tmp_path, run, channels):
    root = pictures(tmp_path / "src", ["a", "b", "c"], values=(0, 1), nothing=255)
    (root / "scribbles" / "b.png").unlink()
    (root / "scribbles" / "c.png").unlink()
    (root / "masks" / "c.png").unlink()
    for path in sorted((root / "images").iterdir()) if channels > 1 else ():
        shutil.copyfile(path, path.with_name(f"{path.stem}_0001.png"))
        path.rename(path.with_name(f"{path.stem}_0000.png"))
    refused = run("import", "folder", root, tmp_path / "no")
    assert refused.code == 2
    assert "--unlabelled" in refused.err
    result = run("import", "folder", root, tmp_path / "out", "--unlabelled")
    assert result.code == 0
    assert "2 cases without a scribble are unlabelled: b, c" in result.err
    made = Dataset.open(tmp_path / "out")
    assert (made.cases, len(made.channels)) == (("a", "b", "c"), channels)
    assert [(made.read_scribble(case)[0] >= 0).any() for case in made.cases] == [True, False, False]
    assert [made.has_reference(case) for case in made.cases] == [True, True, False]
    assert {finding.kind for finding in check(made).findings} == {"empty"}
    both = run("import", "folder", root, tmp_path / "both", "--unlabelled", "--dense")
    assert both.code == 0
    made = Dataset.open(tmp_path / "both")
    assert [(made.read_scribble(case)[0] >= 0).any() for case in made.cases] == [True, True, False]


def test_label_pictures_of_three_equal_planes(tmp_path):
    root = pictures(tmp_path / "src", ["a", "b"], values=(0, 1), nothing=2)
    for path in [*(root / "scribbles").iterdir(), *(root / "masks").iterdir()]:
        Image.open(path).convert("RGB").save(path)
    made, _ = import_dataset("folder", root, tmp_path / "out")
    assert made.labels.names == ("background", "1")
    assert check(made).findings == ()
    coloured = np.zeros((8, 9, 3), np.uint8)
    coloured[..., 0] = 1
    Image.fromarray(coloured).save(root / "scribbles" / "a.png")
    with pytest.raises(PclmixError, match=r"scribbles/a\.png"):
        import_dataset("folder", root, tmp_path / "no")


def test_a_folder_of_scribbles_is_not_searched_for_images(tmp_path, run):
    """Images lie in folders below SRC, and so do the labels."""
    root = pictures(tmp_path / "made", ["a", "b"], values=(0, 1), nothing=2)
    source = tmp_path / "src"
    source.mkdir()
    (root / "images").rename(source / "pictures")
    (root / "scribbles").rename(source / "drawn")
    (root / "masks").rename(source / "truth")
    options = Options(scribbles=source / "drawn", masks=source / "truth")
    made, _ = import_dataset("folder", source, tmp_path / "out", options)
    assert made.cases == ("a", "b")
    result = run("import", "folder", source / "drawn", tmp_path / "no", "--scribbles", source / "drawn")
    assert result.code == 2
    assert "--scribbles" in result.err


def test_one_of_several_annotators(tmp_path, run):
    root = pictures(tmp_path / "src", ["a", "b"], values=(0, 1), nothing=255)
    shutil.copytree(root / "scribbles", root / "scribbles_1")
    (root / "scribbles").rename(root / "scribbles_0")
    result = run("import", "folder", root, tmp_path / "out")
    assert result.code == 2
    assert f"--scribbles {root / 'scribbles_0'}" in result.err
    assert run("import", "folder", root, tmp_path / "out", "--scribbles", root / "scribbles_0").code == 0


def two_maps(root: Path) -> Path:
    """The strokes of `pictures` as positive and negative maps of 0 and 255."""
    for name, value in (("positive", 1), ("negative", 0)):
        (root / "drawn" / name).mkdir(parents=True)
        for path in (root / "scribbles").iterdir():
            plane = np.asarray(Image.open(path))
            Image.fromarray(np.where(plane == value, 255, 0).astype(np.uint8)).save(root / "drawn" / name / path.name)
    shutil.rmtree(root / "scribbles")
    return root / "drawn"


def test_positive_and_negative_strokes_of_one_class(tmp_path, run):
    root = pictures(tmp_path / "src", ["a", "b", "c"], values=(0, 1), nothing=2)
    both, _ = import_dataset("folder", root, tmp_path / "one")
    drawn = two_maps(root)
    arguments = ["import", "folder", root, tmp_path / "two", "--scribbles", drawn, "--classes", "background,cell"]
    assert run(*arguments).code == 0
    made = Dataset.open(tmp_path / "two")
    assert made.labels.names == ("background", "cell")
    for case in made.cases:
        np.testing.assert_array_equal(made.read_scribble(case)[0], both.read_scribble(case)[0])
        np.testing.assert_array_equal(made.read_reference(case)[0], both.read_reference(case)[0])
    (drawn / "negative" / "b.png").unlink()
    result = run("import", "folder", root, tmp_path / "no", "--scribbles", drawn)
    assert result.code == 2
    assert "b" in result.err
    skipped = run("import", "folder", root, tmp_path / "skipped", "--scribbles", drawn, "--skip-unmatched")
    assert skipped.code == 0
    assert Dataset.open(tmp_path / "skipped").cases == ("a", "c")
    shutil.copyfile(drawn / "positive" / "b.png", drawn / "negative" / "b.png")
    result = run("import", "folder", root, tmp_path / "no", "--scribbles", drawn)
    assert result.code == 2
    assert "negative/b.png" in result.err


MEDSCRIBBLE = Path(__file__).parents[2] / "../shared/sets/medscribble.tar"


@pytest.mark.skipif(not MEDSCRIBBLE.is_file(), reason="needs ../shared/sets/medscribble.tar")
def test_medscribble_imports(tmp_path):
    import tarfile

    with tarfile.open(MEDSCRIBBLE) as archive:
        archive.extractall(tmp_path / "sets", filter="data")
    tasks = sorted(p.parent for p in (tmp_path / "sets").rglob("scribbles_0"))
    assert len(tasks) == 12
    for task in tasks:
        options = Options(scribbles=task / "scribbles_2", classes=("background", "structure"))
        made, notes = import_dataset("folder", task, tmp_path / "out" / task.name, options)
        assert notes == ()
        assert check(made).errors == []

"""Geometry is kept: millimetres as read, and the header that a written file copies."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.spatial.transform import Rotation

from pclmix.io.volume import Geometry, read_image, read_labels, write_image, write_labels, write_map

RAW = Path(__file__).parents[2] / "../shared/acdc/raw"
SPACE_FIELDS = ("pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y")
SPACE_FIELDS += ("qoffset_z", "srow_x", "srow_y", "srow_z", "dim", "xyzt_units", "intent_code", "slice_code")


def assert_same_space(before: Path, after: Path) -> None:
    """Every field of the header that says where voxels are, bit for bit."""
    first, second = nib.load(before).header, nib.load(after).header
    for name in SPACE_FIELDS:
        assert first[name].tobytes() == second[name].tobytes(), name


@st.composite
def headers(draw):
    """A NIfTI image of any shape, type, orientation and form codes, sform and pixdim agreeing or not."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.uint16, np.float32, np.float64]))
    spacing = np.array(draw(st.lists(st.floats(0.1, 12), min_size=3, max_size=3)))
    turn = Rotation.from_euler("xyz", draw(st.lists(st.floats(-180, 180), min_size=3, max_size=3)), degrees=True)
    affine = np.eye(4)
    affine[:3, :3] = turn.as_matrix() * spacing * draw(st.sampled_from([1, -1]))
    affine[:3, 3] = draw(st.lists(st.floats(-300, 300), min_size=3, max_size=3))
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, shape).astype(dtype)
    image = nib.Nifti1Image(values, affine, dtype=dtype)
    image.set_qform(affine, code=draw(st.integers(0, 2)))
    image.set_sform(affine, code=draw(st.integers(0, 4)))
    if draw(st.booleans()):  # as ACDC's own files: the sform says 1 mm, pixdim the truth
        image.header["srow_x"], image.header["srow_y"] = [-1, 0, 0, 0], [0, -1, 0, 0]
        image.header["srow_z"] = [0, 0, 1, 0]
    image.header["pixdim"][1 : 1 + len(shape)] = spacing[: len(shape)]
    unit = draw(st.sampled_from(["mm", "unknown", "micron"]))
    image.header.set_xyzt_units(unit)
    return values, image, spacing * (0.001 if unit == "micron" else 1.0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers(), st.sampled_from([".nii.gz", ".nii"]))
def test_geometry_survives_reading_and_writing(tmp_path, made, ending):
    values, image, spacing = made
    before, after, real, again = (tmp_path / f"{n}{ending}" for n in ("before", "after", "real", "again"))
    nib.save(nib.Nifti1Image(values, None, image.header), before)
    volume = read_image(before)
    assert volume.array.dtype == values.dtype
    stored = values if values.ndim == 3 else values[..., None]
    np.testing.assert_array_equal(volume.array[0].transpose(2, 1, 0), stored)
    wanted = spacing[: values.ndim]
    np.testing.assert_allclose(volume.geometry.spacing[::-1][: values.ndim], wanted, rtol=1e-5)

    write_labels(after, volume.array[0], volume.geometry, ("background", "a"))
    write_map(real, volume.array[0] / 3, volume.geometry)
    write_image(again, volume.array[0], volume.geometry)
    for path in (after, real, again):
        assert_same_space(before, path)
        assert read_image(path).geometry.same_grid(volume.geometry) == ""
    np.testing.assert_array_equal(read_labels(after)[0], volume.array[0])
    np.testing.assert_array_equal(np.asarray(nib.load(again).dataobj), values)
    assert nib.load(again).get_data_dtype() == values.dtype
    assert nib.load(real).get_data_dtype() == np.float32


@pytest.mark.skipif(not RAW.is_dir(), reason="needs ../shared/acdc/raw, three patients of ACDC")
@pytest.mark.parametrize("kind", ["", "_gt", "_scribble"])
def test_acdc_millimetres_come_from_pixdim(tmp_path, kind):
    path = RAW / "patient001" / f"patient001_frame01{kind}.nii.gz"
    volume = read_image(path)
    assert volume.array.shape == (1, 10, 256, 216)
    assert volume.array.dtype == (np.uint8 if kind else np.int16)
    assert volume.geometry.spacing == (10.0, 1.5625, 1.5625)
    assert volume.geometry.sform_spacing == (1.0, 1.0, 1.0)
    write_labels(tmp_path / "out.nii.gz", volume.array[0] % 4, volume.geometry)
    assert_same_space(path, tmp_path / "out.nii.gz")
    np.testing.assert_array_equal(nib.load(path).affine, nib.load(tmp_path / "out.nii.gz").affine)


def test_nifti_two_is_read_and_written_as_one(tmp_path):
    image = nib.Nifti2Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.diag([2, 3, 4, 1.0]))
    nib.save(image, tmp_path / "two.nii.gz")
    volume = read_image(tmp_path / "two.nii.gz")
    assert volume.geometry.spacing == (4, 3, 2)
    assert volume.array.shape == (1, 4, 3, 2)
    write_labels(tmp_path / "one.nii.gz", volume.array[0], volume.geometry)
    array, geometry = read_labels(tmp_path / "one.nii.gz")
    np.testing.assert_array_equal(array, volume.array[0])
    assert geometry.same_grid(volume.geometry) == ""


def test_scaled_integers_are_rescaled(tmp_path):
    image = nib.Nifti1Image(np.arange(8, dtype=np.int16).reshape(2, 2, 2), np.eye(4))
    image.header.set_slope_inter(0.5, 10)
    nib.save(image, tmp_path / "scaled.nii")
    read = read_image(tmp_path / "scaled.nii")
    np.testing.assert_allclose(read.array[0].transpose(2, 1, 0), np.asarray(nib.load(tmp_path / "scaled.nii").dataobj))
    write_image(tmp_path / "again.nii", read.array[0], read.geometry)
    np.testing.assert_allclose(read_image(tmp_path / "again.nii").array, read.array)


@pytest.mark.parametrize("ending", [".png", ".bmp", ".tif", ".tiff"])
def test_pictures_are_one_slice(tmp_path, ending):
    labels = np.arange(20, dtype=np.uint8).reshape(1, 4, 5)
    write_labels(tmp_path / f"a{ending}", labels, Geometry((1, 4, 5), (1, 1, 1)))
    array, geometry = read_labels(tmp_path / f"a{ending}")
    np.testing.assert_array_equal(array, labels)
    assert geometry.shape == (1, 4, 5)


def test_sixteen_bit_and_colour_pictures(tmp_path):
    from PIL import Image

    deep = (np.arange(20).reshape(4, 5) * 3000).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    read = read_image(tmp_path / "deep.png").array
    assert read.dtype == np.uint16
    np.testing.assert_array_equal(read[0, 0], deep)
    colour = np.random.default_rng(0).integers(0, 255, (6, 7, 3), dtype=np.uint8)
    Image.fromarray(colour).save(tmp_path / "colour.png")
    np.testing.assert_array_equal(read_image(tmp_path / "colour.png").array[:, 0], colour.transpose(2, 0, 1))


def test_tiff_stack_takes_its_spacing_from_the_json_beside_it(tmp_path):
    import tifffile

    stack = np.random.default_rng(0).random((5, 6, 7)).astype(np.float32)
    tifffile.imwrite(tmp_path / "a_0000.tif", stack)
    (tmp_path / "a.json").write_text(json.dumps({"spacing": [5, 0.7, 0.8]}))
    volume = read_image(tmp_path / "a_0000.tif")
    assert volume.geometry.spacing == (5, 0.7, 0.8)
    np.testing.assert_array_equal(volume.array[0], stack)


def test_nifti_2_stays_nifti_2(tmp_path: Path) -> None:
    """Its header holds the affine in double precision and sides beyond 32767, which NIfTI 1 cannot."""
    affine = np.diag([1 / 3, 1 / 7, 2.5, 1.0])
    nib.save(nib.Nifti2Image(np.ones((5, 4, 3), np.int16), affine), tmp_path / "image.nii.gz")
    volume = read_image(tmp_path / "image.nii.gz")
    write_labels(tmp_path / "labels.nii.gz", volume.array[0], volume.geometry)
    assert isinstance(nib.load(tmp_path / "labels.nii.gz"), nib.Nifti2Image)
    assert_same_space(tmp_path / "image.nii.gz", tmp_path / "labels.nii.gz")


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 1), ("RGB", 3), ("RGBA", 3)])
def test_transparency_is_dropped(tmp_path: Path, mode: str, channels: int) -> None:
    grey = np.arange(48, dtype=np.uint8).reshape(6, 8)
    Image.fromarray(grey).convert(mode).save(tmp_path / "picture.png")
    array = read_image(tmp_path / "picture.png").array
    assert array.shape == (channels, 1, 6, 8)
    assert (array == grey).all()


@pytest.mark.parametrize("ending", [".png", ".bmp"])
def test_palette_holds_colours_in_images_and_classes_in_labels(tmp_path: Path, ending: str) -> None:
    indices = np.arange(48, dtype=np.uint8).reshape(6, 8)
    colours = np.random.default_rng(0).integers(0, 256, (256, 3), dtype=np.uint8)
    for name, palette in (("colour", colours), ("grey", np.repeat(colours[:, :1], 3, axis=1))):
        picture = Image.fromarray(indices)
        picture.putpalette(palette.tobytes())
        picture.save(tmp_path / f"{name}{ending}")
        assert (read_labels(tmp_path / f"{name}{ending}")[0] == indices).all()
    assert (read_image(tmp_path / f"colour{ending}").array[:, 0] == np.moveaxis(colours[indices], -1, 0)).all()
    assert (read_image(tmp_path / f"grey{ending}").array[:, 0] == colours[indices][..., 0]).all()

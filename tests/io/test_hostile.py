"""Malicious files: sizes are checked before decoding, and memory is bounded."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import tifffile
from PIL import Image

from pclmix.errors import PclmixError
from pclmix.io.files import VARIABLE, read_json
from pclmix.io.volume import decoded_bytes, read_image, read_labels

MiB = 1 << 20


def zeros_nifti(path: Path, shape: tuple[int, int, int], dtype: Any = np.uint8, slope: float = 1.0) -> Path:
    header = nib.Nifti1Header()
    header["scl_slope"] = slope
    header.set_data_dtype(dtype)
    header.set_data_shape(shape)
    header["magic"], header["vox_offset"] = b"n+1", 352
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(header.binaryblock + bytes(4))
        for _ in range(count // MiB):
            file.write(bytes(MiB))
        file.write(bytes(count % MiB))
    return path


def zeros_tiff(path: Path, side: int) -> Path:
    tifffile.imwrite(path, np.zeros((side, side), np.uint8), compression="zlib")
    return path


def zeros_png(path: Path, side: int, mode: str = "L") -> Path:
    Image.new(mode, (side, side)).save(path)
    return path


BIG: dict[str, Callable[[Path], Path]] = {
    "nii.gz": lambda folder: zeros_nifti(folder / "a.nii.gz", (512, 512, 81)),
    "nii": lambda folder: zeros_nifti(folder / "a.nii", (512, 512, 81)),
    "tif": lambda folder: zeros_tiff(folder / "a.tif", 4600),
    "png": lambda folder: zeros_png(folder / "a.png", 4600),
    "bmp": lambda folder: zeros_png(folder / "a.bmp", 4600),
}


@pytest.mark.parametrize("kind", sorted(BIG))
def test_the_limit_holds_before_decoding(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = BIG[kind](tmp_path)
    assert 20 * MiB <= decoded_bytes(path) <= 21 * MiB
    monkeypatch.setenv(VARIABLE, str(20 * MiB))
    for read in (read_image, read_labels):
        with pytest.raises(PclmixError) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert VARIABLE in str(caught.value)
    monkeypatch.setenv(VARIABLE, str(22 * MiB))
    assert read_image(path).array.nbytes >= 20 * MiB
    monkeypatch.setenv(VARIABLE, "lots")
    with pytest.raises(PclmixError, match=VARIABLE):
        read_image(path)


PEAK = """
import re, sys
from pathlib import Path
from pclmix.io.volume import decoded_bytes, read_image, read_labels
import tifffile, PIL.Image, nibabel
path, read = Path(sys.argv[1]), {"image": read_image, "labels": read_labels}[sys.argv[2]]
decoded = decoded_bytes(path)
def most():  # not ru_maxrss, which a process inherits from the one that started it
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = most()
try:
    read(path)
except Exception as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
print(decoded, most() - before)
"""


HAS_PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def peak(path: Path, kind: str) -> tuple[int, int]:
    """Declared unpacked bytes of a file, and those that reading it used."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path, kind], capture_output=True, text=True, check=True, env={**os.environ}
    )
    decoded, taken = map(int, done.stdout.split())
    return decoded, taken


@HAS_PROC
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda folder: zeros_nifti(folder / "a.nii.gz", (512, 512, 240)), "image"),
        (lambda folder: zeros_nifti(folder / "a.nii.gz", (512, 512, 240)), "labels"),
        (lambda folder: zeros_nifti(folder / "a.nii.gz", (512, 512, 60), np.float32), "image"),
        (lambda folder: zeros_tiff(folder / "a.tif", 8_000), "image"),
        (lambda folder: zeros_png(folder / "a.png", 8_000), "image"),
        (lambda folder: zeros_png(folder / "a.png", 4_600, "RGB"), "image"),
        (lambda folder: zeros_png(folder / "a.png", 4_600, "RGB"), "labels"),
        (lambda folder: zeros_png(folder / "a.png", 4_600, "RGBA"), "image"),
        (lambda folder: zeros_png(folder / "a.png", 6_000, "LA"), "image"),
        (lambda folder: zeros_png(folder / "a.jpg", 4_600, "CMYK"), "image"),
        (lambda folder: zeros_nifti(folder / "a.nii.gz", (512, 512, 30), np.float64, 2.0), "image"),
    ],
)
def test_peak_memory_is_a_small_multiple_of_the_image(make: Callable[[Path], Path], kind: str, tmp_path: Path) -> None:
    decoded, taken = peak(make(tmp_path), kind)
    assert decoded > 59 * MiB
    assert taken < 2.5 * decoded + 16 * MiB, f"{taken / decoded:.1f} times"


@HAS_PROC
def test_peak_memory_is_that_of_the_reader_alone(tmp_path: Path) -> None:
    """Not of the process that starts it, however large: the tests above would prove nothing."""
    ballast = np.ones(256 * MiB, np.uint8)
    _, taken = peak(zeros_png(tmp_path / "a.png", 8_000), "image")
    assert taken > 60 * MiB
    assert ballast.all()


def test_gzip_longer_than_its_voxels(tmp_path: Path) -> None:
    path = zeros_nifti(tmp_path / "a.nii.gz", (8, 8, 8))
    with path.open("ab") as file:
        file.write(gzip.compress(bytes(64 * MiB), compresslevel=1))
    with pytest.raises(PclmixError, match=r"a\.nii\.gz"):
        read_image(path)


@pytest.mark.parametrize("shape", [(32767, 32767, 32767), (-5, 8, 8)])
def test_impossible_header(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    path = zeros_nifti(tmp_path / "a.nii", (8, 8, 8))
    content = bytearray(path.read_bytes())
    content[42:48] = struct.pack("<3h", *shape)
    path.write_bytes(content)
    with pytest.raises(PclmixError, match=r"a\.nii"):
        read_image(path)


@HAS_PROC
def test_oversized_header_allocates_no_memory(tmp_path: Path) -> None:
    path = zeros_nifti(tmp_path / "a.nii.gz", (8, 8, 8))
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[42:48] = struct.pack("<3h", 1000, 1000, 1000)
    path.write_bytes(gzip.compress(content))
    decoded, taken = peak(path, "image")
    assert decoded == 10**9
    assert taken < 32 * MiB
    with pytest.raises(PclmixError, match="truncated"):
        read_image(path)


def test_a_tiff_reads_no_other_file(tmp_path: Path) -> None:
    """OME-XML names the file that holds each plane."""
    secret = np.full((20, 30), 77, np.uint8)
    tifffile.imwrite(tmp_path / "secret.tif", secret)
    xml = """<?xml version="1.0" encoding="UTF-8"?>
<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">
<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="30" SizeY="20" SizeZ="2" SizeC="1" SizeT="1">
<Channel ID="Channel:0:0" SamplesPerPixel="1"/>
<TiffData IFD="0" FirstZ="0" PlaneCount="1"><UUID FileName="own.ome.tif">urn:uuid:1</UUID></TiffData>
<TiffData IFD="0" FirstZ="1" PlaneCount="1"><UUID FileName="secret.tif">urn:uuid:2</UUID></TiffData>
</Pixels></Image></OME>"""
    own = np.full((20, 30), 5, np.uint8)
    tifffile.imwrite(tmp_path / "own.ome.tif", own, description=xml, metadata=None)
    assert (tifffile.imread(tmp_path / "own.ome.tif") == 77).any(), "what the library does when it is not told"
    array = read_image(tmp_path / "own.ome.tif").array
    np.testing.assert_array_equal(array, own[None, None])


def test_own_pages_of_an_ome_tiff_are_a_stack(tmp_path: Path) -> None:
    stack = np.random.default_rng(0).integers(0, 255, (5, 20, 30), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.ome.tif", stack, ome=True, photometric="minisblack")
    np.testing.assert_array_equal(read_image(tmp_path / "a.ome.tif").array[0], stack)


@pytest.mark.parametrize("options", [{}, {"imagej": True}, {"truncate": True}, {"imagej": True, "truncate": True}])
def test_imagej_stack_with_one_described_page(options: dict[str, Any], tmp_path: Path) -> None:
    stack = np.random.default_rng(0).integers(0, 255, (5, 20, 30), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", stack, photometric="minisblack", **options)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif").array[0], stack)


@HAS_PROC
def test_strip_larger_than_declared(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((64, 64), np.uint8), compression="zlib", byteorder="<")
    with tifffile.TiffFile(path) as file:
        entries = {tag.name: (tag.offset, tag.code) for tag in file.pages[0].tags}
    content = bytearray(path.read_bytes())
    bomb = zlib.compress(bytes(256 * MiB), 9)
    for name, value in (("StripOffsets", len(content)), ("StripByteCounts", len(bomb))):
        offset, code = entries[name]
        struct.pack_into("<HHII", content, offset, code, 4, 1, value)  # one number of 32 bits
    path.write_bytes(content + bomb)
    decoded, taken = peak(path, "image")
    assert decoded == 64 * 64
    assert taken < 32 * MiB
    with pytest.raises(PclmixError, match=r"a\.tif"):
        read_image(path)


@pytest.mark.parametrize("kind", ["GIF", "EPS", "TIFF", "PPM", "ICO", "WEBP"])
@pytest.mark.parametrize("ending", [".png", ".bmp"])
def test_only_named_formats_are_opened(kind: str, ending: str, tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / f"a{ending}", kind)
    with pytest.raises(PclmixError, match=rf"a\{ending}"):
        read_image(tmp_path / f"a{ending}")


def test_a_jpeg_named_png_is_read(tmp_path: Path) -> None:
    Image.new("L", (16, 12), 7).save(tmp_path / "a.png", "JPEG")
    assert read_image(tmp_path / "a.png").array.shape == (1, 1, 12, 16)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"numTraining": ' + "9" * 5000 + "}",
        "\ud800".encode("utf-8", "surrogatepass"),
        b"\xff\xfe\x00",
    ],
    ids=["open", "deep", "digits", "surrogate", "bytes"],
)
def test_json_that_cannot_be_read(text: Any, tmp_path: Path, run: Callable[..., Any]) -> None:
    path = tmp_path / "set" / "dataset.json"
    path.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PclmixError, match=r"dataset\.json"):
        read_json(path)
    for command in (("check", path.parent), ("split", path.parent), ("train", path.parent, "--out", tmp_path / "run")):
        result = run(*command)
        assert result.code == 2
        assert result.err.count("error: ") == 1
        assert "Traceback" not in result.err
        assert len(result.err) < 1000
    assert not (tmp_path / "run").exists()


def test_a_huge_json_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: takes no space
    with pytest.raises(PclmixError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_very_long_path(tmp_path: Path, run: Callable[..., Any], phantom_dataset: Path) -> None:
    name = "x" * 5000
    for command in (
        ("check", name),
        ("import", "folder", name, tmp_path / "out"),
        ("import", "folder", tmp_path, name),
        ("phantom", name),
        ("scribble", name, tmp_path / "out"),
        ("split", name),
        ("train", name, "--out", tmp_path / "run"),
        ("train", phantom_dataset, "--out", name),
        ("predict", name, tmp_path, tmp_path / "out"),
    ):
        result = run(*command)
        assert result.code == 2, command[0]
        assert result.err.count("error: ") == 1
        assert "Traceback" not in result.err + result.out
    assert list(tmp_path.iterdir()) == []


def test_invalid_numbers_in_dataset_json(dataset: Path, run: Callable[..., Any], edit_json: Any) -> None:
    content = json.loads((dataset / "dataset.json").read_text())
    for key, value in (
        ("numTraining", True),
        ("numTraining", 1e400),
        ("file_ending", {}),
        ("patient_pattern", "(?:" * 5000),
    ):
        (dataset / "dataset.json").write_text(json.dumps({**content, key: value}))
        result = run("check", dataset)
        assert (result.code, result.err.count("error: ")) == (2, 1), key
        assert key in result.err


def test_tiff_with_impossible_size(tmp_path: Path) -> None:
    """One changed byte in ImageLength; filling the missing strips with zeros took 45 seconds."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.arange(72, dtype=np.int16).reshape(8, 9), compression="zlib", byteorder="<")
    with tifffile.TiffFile(path) as file:
        tag = file.pages[0].tags["ImageLength"]
    content = bytearray(path.read_bytes())
    struct.pack_into("<HHII", content, tag.offset, tag.code, 4, 1, 16_711_688)
    path.write_bytes(content)
    started = time.perf_counter()
    with pytest.raises(PclmixError, match=r"a\.tif.*300810384"):
        read_image(path)
    assert time.perf_counter() - started < 5

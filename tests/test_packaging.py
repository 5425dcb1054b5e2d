"""The distribution: one small sdist from any clone, and a wheel that works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from pclmix import __version__

ROOT = Path(__file__).parents[1]
LARGEST = 2_000_000  # bytes of an sdist; most of it is the viewer of the workbench


def build(source: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone: what git knows, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no git clone, so what belongs to it is not known")
    clean = tmp_path_factory.mktemp("clean") / "pclmix"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("results/", "shared/")):
            (clean / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clean / name)
    return clean


@pytest.fixture(scope="module")
def sdist(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(clean, "sdist", tmp_path_factory.mktemp("sdist"))


#: What work, editors and other tools leave in a clone.
LEFT = (
    "run1/last.ckpt",
    "demo/report.html",
    "data/imagesTr/a_0000.nii.gz",
    "docs/notebooks/tutorial/run/last.ckpt",
    "site/index.html",
    ".venv/lib/big.so",
    "build/lib/pclmix/old.py",
    "dist/pclmix-0.0.1.tar.gz",
    ".pytest_cache/x",
    "src/pclmix/__pycache__/config.cpython-311.pyc",
    "src/pclmix/cli/.DS_Store",
    "src/pclmix/cli/.ipynb_checkpoints/train-checkpoint.py",
    "src/pclmix/config.py.orig",
    "src/pclmix/config.py~",
    "src/pclmix/web/static/node_modules/x.js",
    "recipes/.mine.yaml.swp",
    "recipes/mine.yaml",
    "heart.onnx",
    "runtime/heart.onnx",
    "runtime/out/a.nii.gz",
    "runtime/src/pclmix_runtime/__pycache__/command.cpython-311.pyc",
    "runtime/src/pclmix_runtime/command.py.orig",
)


def test_a_used_clone_gives_the_same_small_sdist(clean: Path, sdist: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    shutil.copytree(clean, used)
    for name in LEFT:
        (used / name).parent.mkdir(parents=True, exist_ok=True)
        (used / name).write_bytes(b"x" * 1000)
    again = build(used, "sdist", tmp_path / "out")
    assert again.read_bytes() == sdist.read_bytes()
    assert sdist.stat().st_size < LARGEST
    runtime, other = (build(one / "runtime", "sdist", tmp_path / f"runtime-{one.name}") for one in (clean, used))
    assert other.read_bytes() == runtime.read_bytes()


def test_each_recipe_of_the_clone_is_packed(clean: Path) -> None:
    """pyproject.toml names them, so that a user's own recipe beside them is not packed."""
    listed = subprocess.run(["git", "ls-files", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = tomllib.loads((clean / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert set(targets["wheel"]["force-include"]) == set(listed.stdout.split())
    assert set(listed.stdout.split()) < set(targets["sdist"]["only-include"])


def test_the_runtime_s_wheel_is_the_same_from_its_sdist(clean: Path, tmp_path: Path) -> None:
    """The sdist has the shared modules already; in a clone they come from beside it."""
    source = build(clean / "runtime", "sdist", tmp_path / "sdist")
    shutil.unpack_archive(source, tmp_path, filter="data")
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    wheels = [build(one, "wheel", tmp_path / name) for one, name in ((clean / "runtime", "a"), (unpacked, "b"))]
    inside = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            inside.append({name: content.read(name) for name in content.namelist() if "RECORD" not in name})
    assert inside[0] == inside[1]
    assert "pclmix_runtime/inference/onnx.py" in inside[0]
    assert [name for name in inside[0] if name.endswith("/LICENSE")]


def test_the_wheel_works_in_a_fresh_venv(sdist: Path, tmp_path: Path) -> None:
    """Installed without the clone; torch and the other requirements come from the environment of this test."""
    shutil.unpack_archive(sdist, tmp_path / "source", filter="data")
    wheel = build(tmp_path / "source" / f"pclmix-{__version__}", "wheel", tmp_path / "wheel")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for name in ("py.typed", "recipes/fast.yaml", "web/static/index.html", "report/templates/base.html.j2"):
        assert f"pclmix/{name}" in inside
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # an editable pclmix in it is not
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PCLMIX_CACHE"] = str(tmp_path / "cache")

    def call(*words: str) -> str:
        done = subprocess.run(list(words), capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pclmix = str(venv / "bin" / "pclmix")
    assert call(pclmix, "--version") == f"pclmix {__version__}\n"
    assert str(venv) in call(str(python), "-c", "import pclmix; print(pclmix.__file__)")
    call(pclmix, "phantom", "data", "--cases", "2")
    call(pclmix, "train", "data", "--out", "run", "--recipe", "tiny", "--iterations", "1", "--fold", "1")
    assert "tiny" in call(pclmix, "info", "run")
    call(pclmix, "predict", "run", "data", "out", "--fold", "1")
    assert "Dice" in call(pclmix, "evaluate", "out", "data", "--fold", "1")

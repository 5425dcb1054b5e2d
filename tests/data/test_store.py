"""The store: keyed by content and settings, memory-mapped."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from pclmix.data import store as module
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, cache_folder, open_store
from pclmix.errors import PclmixError

SIZE = (8, 16)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def stores(cache: Path) -> set[str]:
    return {p.name for p in cache.iterdir() if p.name not in ("locks", "known")} if cache.is_dir() else set()


def test_store_content(dataset: Path, cache: Path) -> None:
    data = Dataset.open(dataset)
    store = open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert store.images.shape == (18, 1, *SIZE)
    assert store.labels.shape == (18, 1, *SIZE)
    assert store.cases == data.cases
    assert store.case_of.tolist() == [case for case in range(6) for _ in range(3)]
    assert store.spacings == ((8.0, 1.5, 1.5),) * 6
    assert store.images.min() >= 0
    assert store.images.max() <= 1
    for number, case in enumerate(data.cases):
        drawn, _ = data.read_scribble(case)
        assert np.array_equal(store.labels[3 * number : 3 * number + 3, 0], Settings(SIZE).labels(drawn))


def test_a_store_is_mapped_and_cannot_be_written(dataset: Path, cache: Path) -> None:
    data = Dataset.open(dataset)
    store = open_store(data, data.cases, Settings(SIZE), cache=cache)
    for array in (store.images, store.labels):
        assert isinstance(array, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert store.nbytes == sum(p.stat().st_size for p in cache.rglob("*.[fi]16"))


def test_a_store_is_prepared_once(dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.open(dataset)
    first = open_store(data, data.cases, Settings(SIZE), cache=cache)
    monkeypatch.setattr(module, "_prepare_case", lambda *_: pytest.fail("prepared again"))
    second = open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert np.array_equal(first.images, second.images)
    # The same files elsewhere are the same content.
    moved = dataset.with_name("moved")
    shutil.copytree(dataset, moved)
    open_store(Dataset.open(moved), data.cases, Settings(SIZE), cache=cache)
    assert len(stores(cache)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda s: Settings((16, 16)),
        lambda s: Settings(SIZE, intensity="volume"),
        lambda s: Settings(SIZE, source="reference"),
        lambda s: Settings(SIZE, maps="some method"),
    ],
)
def test_settings_change_the_store(dataset: Path, cache: Path, change: Callable[[Settings], Settings]) -> None:
    data = Dataset.open(dataset)
    for chosen in (Settings(SIZE), change(Settings(SIZE))):
        open_store(data, data.cases, chosen, cache=cache)
    assert len(stores(cache)) == 2


def test_format_changes_the_store(dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.open(dataset)
    open_store(data, data.cases, Settings(SIZE), cache=cache)
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert len(stores(cache)) == 2


@pytest.mark.parametrize("part", ["image", "scribble"])
def test_a_changed_file_is_prepared_again(dataset: Path, cache: Path, part: str) -> None:
    data = Dataset.open(dataset)
    before = open_store(data, data.cases, Settings(SIZE), cache=cache)
    path = data.image_paths(data.cases[2])[0] if part == "image" else data.scribble_path(data.cases[2])
    file = nib.load(path)
    changed = np.asarray(file.dataobj).copy()
    changed[4, 4, 1] = 1 - min(changed[4, 4, 1], 1)
    nib.save(nib.Nifti1Image(changed, file.affine, file.header), path)
    after = open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert len(stores(cache)) == 2
    same = (before.images == after.images).all(axis=(1, 2, 3)) & (before.labels == after.labels).all(axis=(1, 2, 3))
    assert set(np.flatnonzero(~same)) <= {7}  # the one slice that was changed
    assert part == "scribble" or not same[7]


def test_the_dense_mask_is_only_opened_when_asked_for(dataset: Path, cache: Path) -> None:
    data = Dataset.open(dataset)
    shutil.rmtree(dataset / "referenceTr")
    open_store(data, data.cases, Settings(SIZE), cache=cache)
    with pytest.raises(PclmixError, match="referenceTr"):
        open_store(data, data.cases, Settings(SIZE, source="reference"), cache=cache)


def test_maps_of_a_method(dataset: Path, cache: Path) -> None:
    def precompute(image: Any, scribble: Any) -> dict[str, Any]:
        assert image.shape == (1, *SIZE)
        return {"b": scribble * 0 + 7, "a": scribble}

    data = Dataset.open(dataset)
    store = open_store(data, data.cases, Settings(SIZE, maps="m"), precompute=precompute, cache=cache)
    assert store.maps == ("a", "b")
    assert np.array_equal(store.labels[:, 0], store.labels[:, 1])
    assert (store.labels[:, 2] == 7).all()


def inverted(_: Any, scribble: Any) -> dict[str, Any]:
    return {"m": -scribble}


@pytest.mark.parametrize("maps", ["", "m"])
def test_many_cases_come_back_in_order(dataset: Path, cache: Path, maps: str) -> None:
    """Threads share the work; the layout is the same."""
    data = Dataset.open(dataset)
    chosen, precompute = Settings(SIZE, maps=maps), inverted if maps else None
    store = open_store(data, [*data.cases] * 7, chosen, precompute=precompute, cache=cache)
    alone = open_store(data, data.cases, chosen, precompute=precompute, cache=cache)
    assert np.array_equal(store.images, np.tile(alone.images, (7, 1, 1, 1)))
    assert np.array_equal(store.labels, np.tile(alone.labels, (7, 1, 1, 1)))


def test_invalid_case_leaves_no_store(dataset: Path, cache: Path) -> None:
    data = Dataset.open(dataset)
    bad = data.image_paths(data.cases[3])[0]
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(PclmixError, match=bad.name):
        open_store(data, [*data.cases] * 3, Settings(SIZE), cache=cache)
    assert not stores(cache)


SCRIPT = """
import sys
from pathlib import Path
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, open_store

def inverted(_, scribble):
    return {"m": -scribble}

data = Dataset.open(Path(sys.argv[1]))
settings = Settings((8, 16), maps="m")
store = open_store(data, [*data.cases] * 2, settings, precompute=inverted, cache=Path(sys.argv[2]))
print(len(store), "slices")
"""


def test_preparation_does_not_rerun_the_main_script(dataset: Path, cache: Path) -> None:
    """A script without a main guard, from a pipe, with its own method: no process runs it again."""
    done = subprocess.run(
        [sys.executable, "-", dataset, cache], input=SCRIPT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "36 slices\n", done.stderr


@pytest.mark.parametrize("damage", ["images.f16", "labels.i16", "index.json", "cut"])
def test_a_damaged_store_is_prepared_again(dataset: Path, cache: Path, damage: str) -> None:
    data = Dataset.open(dataset)
    before = np.array(open_store(data, data.cases, Settings(SIZE), cache=cache).images)
    folder = cache / next(iter(stores(cache)))
    if damage == "cut":
        (folder / "index.json").write_text('{"slices": [3')
    else:
        (folder / damage).write_bytes(b"")
    after = open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert np.array_equal(after.images, before)
    assert (folder / "labels.i16").stat().st_size == after.labels.nbytes
    assert len(stores(cache)) == 1


def test_full_disk_gives_one_message(dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        name = str(cache / ".key" / "images.f16")

        def write(self, _: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = module._write
    monkeypatch.setattr(module, "_write", lambda _, array: write(Full(), array))
    data = Dataset.open(dataset)
    with pytest.raises(PclmixError, match=rf"{cache}.*{os.strerror(errno.ENOSPC)}.*PCLMIX_CACHE"):
        open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert not stores(cache)


def test_temporary_files_of_killed_writers_are_removed_after_days(dataset: Path, cache: Path) -> None:
    for name, days in ((".old-abcdefgh", 3), (".new-abcdefgh", 0)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - 86400 * days,) * 2)
    data = Dataset.open(dataset)
    open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert {n for n in stores(cache) if n.startswith(".")} == {".new-abcdefgh"}


def test_concurrent_writers_share_one_store(dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is on a filesystem whose locks do not reach the other process."""
    monkeypatch.setattr(module, "_preparing", lambda _: nullcontext())
    data = Dataset.open(dataset)
    prepare, raced, lock = module._prepare_case, [], threading.Lock()

    def racing(*job: Any) -> Any:
        if lock.acquire(blocking=False):  # the first of several threads alone
            raced.append(True)
            other = open_store(data, data.cases, Settings(SIZE), cache=cache)  # another process, meanwhile
            raced.append(other.images.filename)
        return prepare(*job)

    monkeypatch.setattr(module, "_prepare_case", racing)
    store = open_store(data, data.cases, Settings(SIZE), cache=cache)
    assert len(store) == 18
    assert len(stores(cache)) == 1
    assert Path(raced[1]).stat().st_ino == Path(store.images.filename).stat().st_ino


def test_old_stores_are_removed(dataset: Path, cache: Path) -> None:
    data = Dataset.open(dataset)
    for side in (8, 16, 24):
        open_store(data, data.cases, Settings((side, side)), cache=cache)
    last = open_store(data, data.cases, Settings((8, 8)), cache=cache)  # used again, so no longer the oldest
    assert last.folder is not None
    module._remove_old_stores(cache, keep=1)
    assert len(stores(cache)) == 1
    assert next(iter(stores(cache))) == last.folder.name


def test_concurrent_processes_prepare_once(dataset: Path, cache: Path, tmp_path: Path) -> None:
    """Tasks of a study on one node: one prepares, the others wait for it."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom pclmix.data import store\n"
        "from pclmix.data.dataset import Dataset\n"
        "data, cache, log = Dataset.open(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])\n"
        "prepare = store._prepare\n"
        "def slow(*given):\n"
        "    log.open('a').write('prepared\\n')\n"
        "    time.sleep(1.0)\n"
        "    return prepare(*given)\n"
        "store._prepare = slow\n"
        "print(len(store.open_store(data, data.cases, store.Settings((8, 16)), cache=cache)))\n"
    )
    words = [sys.executable, "-c", program, dataset, cache, tmp_path / "log"]
    started = [subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in started] == ["18\n"] * 3
    assert (tmp_path / "log").read_text() == "prepared\n"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PCLMIX_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PCLMIX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pclmix"


def test_store_counts_drawn_and_kept_pixels(dataset: Path, cache: Path, edit_json: Any) -> None:
    case = "patient001_frame01"
    edit_json(dataset / "dataset.json", lambda d: d.update(not_annotated={case: ["LV"]}))
    path = dataset / "labelsTr" / "patient002_frame01.nii.gz"
    mask = nib.load(dataset / "referenceTr" / "patient002_frame01.nii.gz")
    nib.save(mask, path)
    data = Dataset.open(dataset)
    for _ in range(2):  # prepared, and from the cache
        store = open_store(data, data.cases, Settings((4, 4), aspect="stretch"), cache=cache)
        assert store.drawn.shape == store.kept.shape == (6, 4)
        for number, name in enumerate(data.cases):
            drawn = data.read_scribble(name)[0]
            assert store.drawn[number].tolist() == np.bincount(drawn[drawn >= 0], minlength=4).tolist()
        assert store.dense.tolist() == [name == "patient002_frame01" for name in data.cases]
        assert (store.kept <= store.drawn).all()
        assert 0 < store.kept_share < 1
        assert store.annotated.tolist() == [[True, True, True, name != case] for name in data.cases]

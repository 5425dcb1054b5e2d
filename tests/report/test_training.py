"""The pictures of a finished run, drawn from its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from PIL import Image

from pclmix.report.training import LOSSES, PICTURES, draw_run
from pclmix.training.scores import EXAMPLES


def test_a_run_gets_its_pictures_once(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    draw_run(run)
    for name in (LOSSES, PICTURES):
        with Image.open(run / name) as picture:
            assert min(picture.size) > 100
    (run / LOSSES).write_bytes(b"mine")
    draw_run(run)
    assert (run / LOSSES).read_bytes() == b"mine"


def test_a_run_without_results_gets_no_picture(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / EXAMPLES).unlink()
    (run / "metrics.jsonl").write_text("")
    draw_run(run)
    assert not list(run.glob("*.png"))


def test_unfinished_drawing_of_a_killed_command_is_removed(tiny_run: Path, tmp_path: Path) -> None:
    """Also where no drawing of that name exists yet: it is the last that a command does."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for name in (LOSSES, PICTURES):
        (run / name).unlink(missing_ok=True)
        left = run / f".{Path(name).stem}-ab3d_x9z.png"
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
    draw_run(run)
    assert not list(run.glob(".*"))
    assert (run / LOSSES).is_file()

"""The pictures of a finished run, drawn from its folder."""

from __future__ import annotations

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

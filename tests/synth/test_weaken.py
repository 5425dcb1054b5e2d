"""`pclmix scribble` on folders of label files: which of them are masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def one_folder_a_case(root: Path, count: int, name: str) -> Path:
    for n in range(count):
        mask = np.zeros((40, 44), np.uint8)
        mask[8 : 20 + n, 10:30] = 1
        (root / f"case{n}").mkdir(parents=True)
        Image.fromarray(mask).save(root / f"case{n}" / name)
    return root


@pytest.mark.parametrize("name", ["label.png", "tumour.png", "x_seg.png"])
def test_every_label_file_of_nested_folders_is_drawn(tmp_path: Path, run: Callable[..., Any], name: str) -> None:
    masks = one_folder_a_case(tmp_path / "masks", 5, name)
    result = run("scribble", masks, tmp_path / "out")
    assert result.code == 0, result.err
    made = sorted(p for p in (tmp_path / "out").rglob("*.png"))
    assert [p.parent.name for p in made] == [f"case{n}" for n in range(5)]
    # Files of one name are different cases: each gets different strokes.
    assert len({p.read_bytes() for p in made}) == 5


def test_images_beside_their_masks_are_left_alone(tmp_path: Path, run: Callable[..., Any]) -> None:
    masks = one_folder_a_case(tmp_path / "masks", 3, "mask.png")
    for folder in masks.iterdir():
        noise = np.random.default_rng(0).integers(0, 255, (40, 44), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "image.png")
    assert run("scribble", masks, tmp_path / "out").code == 0
    assert sorted(p.name for p in (tmp_path / "out").rglob("*.png")) == ["scribble.png"] * 3


def test_one_file_named_as_a_mask_among_many_is_refused(tmp_path: Path, run: Callable[..., Any]) -> None:
    masks = one_folder_a_case(tmp_path / "masks", 5, "tumour.png")
    (masks / "case0" / "tumour.png").rename(masks / "case0" / "tumour_seg.png")
    result = run("scribble", masks, tmp_path / "out")
    assert result.code == 2
    assert "tumour_seg.png" in result.err
    assert "case1/tumour.png" in result.err
    assert not (tmp_path / "out").exists()

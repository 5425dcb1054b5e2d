"""Label maps made for the tests of this folder, and the command line in this process."""

import sys

import numpy as np
import pytest

from pclmix.cli import main
from pclmix.io.volume import Geometry, write_labels
from pclmix.labels import Labels

SPACING = (8.0, 1.5, 1.25)
SHAPE = (4, 24, 20)
CASES = ("p1_ED", "p1_ES", "p2_ED", "p3_ED")
LABELS = Labels(("background", "RV", "Myo"), 3)


def truth(seed):
    """Two discs, one beside the other, a little different for each case."""
    y, x = np.mgrid[: SHAPE[1], : SHAPE[2]]
    out = np.zeros(SHAPE, np.uint8)
    for z in range(SHAPE[0]):
        out[z][(y - 7) ** 2 + (x - 7 - seed % 3) ** 2 < 20 + z] = 1
        out[z][(y - 16) ** 2 + (x - 11) ** 2 < 14 + seed] = 2
    return out


def save(folder, case, array, spacing=SPACING):
    folder.mkdir(exist_ok=True, parents=True)
    write_labels(folder / f"{case}.nii.gz", array, Geometry(array.shape, spacing))


def run(monkeypatch, *arguments):
    """The command line in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["pclmix", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0

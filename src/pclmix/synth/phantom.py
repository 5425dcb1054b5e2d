"""A cardiac-like short-axis set made from nothing: for the demo, for tests, and to see what a method does.

What makes it hard is what makes ACDC hard for scribbles: lookalikes. Outside the background ring nothing is
annotated, and there lie round bright things with dark walls (an aorta, a stomach) and muscle-grey ones (a liver),
so that a network trained on strokes alone paints hearts into them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt

from pclmix.data.dataset import IMAGES, REFERENCE, SCRIBBLES, write_dataset_json, write_splits
from pclmix.data.splits import default_splits
from pclmix.errors import PclmixError
from pclmix.io.files import atomic_folder
from pclmix.io.volume import Geometry, write_labels
from pclmix.labels import Labels
from pclmix.synth.anatomy import Body
from pclmix.synth.scribble import Style, case_rng, simulate

LABELS = Labels(("background", "RV", "Myo", "LV"), 4)
#: How its strokes are drawn by default, and what its anatomy is; `pclmix check` finds the same.
HABITS = {"background": ["ring"], "RV": ["pieces"], "Myo": ["midline", "pieces"], "LV": ["convex", "pieces"]}
FRAMES = ("frame01", "frame02")  #: the full heart (end of diastole) and the contracted one (end of systole)


def make_phantom(
    out: Path,
    cases: int,
    seed: int = 0,
    *,
    style: Style | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Write a complete dataset of `cases` patients, two frames each, and return the names of its cases.

    Names are `phantomXXX_frame01` and `_frame02`. A patient depends on `seed` and its number alone, so a larger set
    begins with the smaller one. `progress` is called with the name of each case written.
    """
    if not 1 <= cases <= 999:
        raise PclmixError(f"cases is {cases}; ask for 1 to 999 patients")
    style = style or Style()
    names: list[str] = []
    with atomic_folder(Path(out)) as root:
        for folder in (IMAGES, SCRIBBLES, REFERENCE):
            (root / folder).mkdir()
        for number in range(1, cases + 1):
            patient = f"phantom{number:03d}"
            body = Body.draw(case_rng(seed, patient))
            for contraction, frame in enumerate(FRAMES):
                name = f"{patient}_{frame}"
                rng = case_rng(seed, name)
                image, mask = body.render(float(contraction), rng)
                scribble = simulate(mask, style, rng)
                geometry = _write_image(root / IMAGES / f"{name}_0000.nii.gz", image, body)
                write_labels(root / SCRIBBLES / f"{name}.nii.gz", LABELS.encode(scribble), geometry, LABELS.names)
                write_labels(root / REFERENCE / f"{name}.nii.gz", LABELS.encode(mask), geometry, LABELS.names)
                names.append(name)
                if progress:
                    progress(name)
        splits = default_splits(names)
        write_dataset_json(
            root,
            channels=("MRI",),
            labels=LABELS,
            ending=".nii.gz",
            cases=len(names),
            name="phantom",
            habits=HABITS if style.kind != "points" and style.amount >= 1 else {"LV": ["convex"]},
            description=f"made by pclmix phantom --cases {cases} --seed {seed}",
        )
        write_splits(root, splits)
    return names


def _write_image(path: Path, image: npt.NDArray[np.int16], body: Body) -> Geometry:
    """Write int16 NIfTI in millimetres with sform, qform and pixdim agreeing; returns its geometry."""
    affine = np.diag([-body.spacing[2], -body.spacing[1], body.spacing[0], 1.0])
    affine[:3, 3] = body.origin
    file = nib.Nifti1Image(image.transpose(2, 1, 0), affine)
    file.header.set_xyzt_units("mm")
    file.set_qform(affine, code=1)
    file.set_sform(affine, code=1)
    nib.save(file, path)
    return Geometry(body.shape, body.spacing, file.header.copy())

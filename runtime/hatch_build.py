"""Takes the torch-free modules of pclmix into pclmix-runtime: one source for reading, resizing and writing.

Their imports of `pclmix` become imports of `pclmix_runtime`, so that both distributions can be installed side by side
and neither owns a file of the other. A source distribution holds the files already and is built as it is.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHARED = (
    "_version.py",
    "errors.py",
    "labels.py",
    "io/__init__.py",
    "io/dicom.py",
    "io/files.py",
    "io/formats.py",
    "io/volume.py",
    "data/__init__.py",
    "data/dataset.py",
    "data/habits.py",
    "data/preprocess.py",
    "inference/__init__.py",
    "inference/files.py",
    "inference/inputs.py",
    "inference/onnx.py",
    "inference/predictor.py",
    "inference/uncertainty.py",
)


def renamed(source: str) -> str:
    """The module's text with `from pclmix...` importing from this distribution.

    >>> renamed("from pclmix.errors import PclmixError  # of pclmix")
    'from pclmix_runtime.errors import PclmixError  # of pclmix'
    """
    return re.sub(r"^(\s*from )pclmix(?=[. ])", r"\1pclmix_runtime", source, flags=re.MULTILINE)


class SharedModules(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root).parent / "src" / "pclmix"
        if not source.is_dir():
            return
        self.made = Path(tempfile.mkdtemp())
        inside = "pclmix_runtime" if self.target_name == "wheel" else "src/pclmix_runtime"
        for name in SHARED:
            copy = self.made / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed((source / name).read_text(encoding="utf-8")), encoding="utf-8")
            build_data["force_include"][str(copy)] = f"{inside}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "made"):
            shutil.rmtree(self.made)

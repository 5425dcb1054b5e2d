"""Training on one device does not import slow packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("monai", "skimage", "onnx", "matplotlib", "torch.distributed.launcher")


def test_training_imports_little(phantom: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from pclmix.training.request import TrainRequest
from pclmix.training.start import run_training
assert run_training(TrainRequest(
    Path({str(phantom)!r}), Path({str(tmp_path / "run")!r}), recipe="tiny", device="cpu",
    overrides=["engine.iterations=2", "optim.clip=1"],
))
heavy = set({HEAVY!r}) & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]

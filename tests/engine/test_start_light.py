"""What a training on one device need not import: each takes seconds before the first step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch._dynamo", "lightning_fabric", "monai", "sympy", "skimage", "onnx")


def test_training_imports_no_compiler(phantom: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from pclmix.engine.start import run_training
assert run_training(Path({str(phantom)!r}), Path({str(tmp_path / "run")!r}), recipe="tiny", device="cpu",
                    overrides=["engine.iterations=2", "optim.clip=1"])
heavy = set({HEAVY!r}) & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]

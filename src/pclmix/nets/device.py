"""Where tensors live: the one place that turns a user's choice into a device."""

from __future__ import annotations

from typing import Literal

import torch

from pclmix.errors import PclmixError


def device_kind(name: str) -> Literal["cpu", "cuda"]:
    """`auto` is the GPU where there is one; a device that is asked for and absent is refused with the way out."""
    if name not in ("auto", "cpu", "cuda"):
        raise PclmixError(f"--device {name} is not known; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise PclmixError("--device cuda: no CUDA device can be used here; use --device cpu, or check the driver")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"

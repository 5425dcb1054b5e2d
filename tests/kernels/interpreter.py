"""Kernels in Triton's interpreter, on a CPU. tests/conftest.py sets TRITON_INTERPRET before Triton is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pclmix import kernels


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, the kernels take float32 tensors on the CPU."""

    def fits(x: Tensor, dtype: torch.dtype) -> bool:
        return x.device.type == "cpu" and x.dtype == torch.float32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_fits", fits)
        yield

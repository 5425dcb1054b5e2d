"""What several tests need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result's shape or value the host must wait for, and constants that must be copied to the device.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",
}


class HostWaitsError(AssertionError):
    """An operation that makes the host wait for the device."""


class NoSync(TorchDispatchMode):
    """Raises on `.item()`, `if tensor`, `.nonzero()`, boolean indexing, `unique`, `torch.tensor(...)` and the like."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING or (name == "repeat_interleave" and func._overloadname == "Tensor"):
            raise HostWaitsError(str(func))
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostWaitsError(f"{func} with a boolean index")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[Any]]:
    """A block in which everything that would make the host wait for a GPU fails, on any device."""
    return NoSync

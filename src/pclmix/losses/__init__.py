"""Losses. Equations: docs/equations.md. They are computed in float32, whatever the precision of the network.

Axes: B batch, K classes (background first), H, W, D embedding width, N anchors, Q queue length. Output shapes depend on
input shapes alone and no function waits for a value on the host, so that a training step can be captured as one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def full(x: Tensor) -> Tensor:
    """bfloat16 and float16 to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def planes(logits: Tensor) -> Tensor:
    """`full`, with (B, K, H, W) contiguous: with few classes, losses are slower in any other memory layout."""
    return logits.to(full(logits[:0]).dtype, memory_format=torch.contiguous_format).contiguous()


def no_autocast(like: Tensor) -> torch.autocast:
    """A block in which matrix products stay in the type of their operands, on the device of `like`."""
    return torch.autocast(like.device.type, enabled=False)

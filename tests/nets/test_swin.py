"""The transformer decoder against slow versions of itself, and maps of any size."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.nets.swin import (
    ExpandAndClassify,
    SwinBlock,
    WindowAttention,
    region_mask,
    relative_positions,
    unfold_pixels,
)


def slow_attention(layer: WindowAttention, x: Tensor) -> Tensor:
    """Pixel by pixel and head by head: who may be seen is decided from positions, with no mask, roll or padding."""
    batch, height, width, channels = x.shape
    dim = channels // layer.heads
    span = 2 * layer.window - 1

    def place(position: int, side: int) -> tuple[int, int]:
        """The window of a position along one axis, and its place in it."""
        window = min(layer.window, side)
        shift = layer.window // 2 if layer.shifted and side > layer.window else 0
        # The shifted grid starts half a window in, and its cut-off first window is a window of its own.
        return (position - shift) // window, (position - shift) % window

    out = torch.zeros_like(x)
    for b in range(batch):
        q, k, v = layer.qkv(x[b]).view(height, width, 3, layer.heads, dim).unbind(2)
        for i in range(height):
            for j in range(width):
                for head in range(layer.heads):
                    scores, values = [], []
                    for m in range(height):
                        for n in range(width):
                            (wi, pi), (wj, pj) = place(i, height), place(j, width)
                            (wm, pm), (wn, pn) = place(m, height), place(n, width)
                            if (wi, wj) != (wm, wn):
                                continue
                            entry = (pi - pm + layer.window - 1) * span + pj - pn + layer.window - 1
                            bias = layer.bias_table[head, entry]
                            scores.append(q[i, j, head] @ k[m, n, head] / math.sqrt(dim) + bias)
                            values.append(v[m, n, head])
                    weights = torch.stack(scores).softmax(0)
                    out[b, i, j, head * dim : (head + 1) * dim] = weights @ torch.stack(values)
    return layer.proj(out)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("height", "width"),
    [(8, 8), (4, 4), (3, 3), (6, 6), (7, 4), (3, 9)],
    ids=["whole", "one window", "smaller", "padded", "padded in one axis", "both"],
)
def test_attention_equals_the_slow_version(height: int, width: int, shifted: bool) -> None:
    torch.manual_seed(0)
    layer = WindowAttention(channels=6, heads=2, window=4, shifted=shifted).double()
    with torch.no_grad():
        layer.bias_table.normal_()
        x = torch.randn(2, height, width, 6, dtype=torch.float64)
        torch.testing.assert_close(layer(x), slow_attention(layer, x), rtol=1e-5, atol=1e-6)


def test_attention_passes_gradients_to_input_and_bias() -> None:
    torch.manual_seed(0)
    layer = WindowAttention(channels=4, heads=2, window=2, shifted=True).double()
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    table = layer.bias_table

    def forward(x: Tensor, table: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"bias_table": table}, (x,))

    assert torch.autograd.gradcheck(forward, (x, table), eps=1e-5, atol=1e-4)


def test_cached_constants_serve_training_after_inference() -> None:
    relative_positions.cache_clear()
    region_mask.cache_clear()
    block = SwinBlock(8, 2, 4, shifted=True)
    with torch.inference_mode():
        block(torch.randn(1, 8, 8, 8))
    block(torch.randn(1, 8, 8, 8)).sum().backward()
    assert block.attention.bias_table.grad is not None


def test_expand_and_classify_equals_its_parts() -> None:
    torch.manual_seed(0)
    layer = ExpandAndClassify(channels=6, classes=3, factor=4).double()
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    pixels = F.layer_norm(unfold_pixels(layer.expand(x), 4), (6,), eps=layer.eps)
    expected = layer.head(pixels).permute(0, 3, 1, 2)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)
    assert layer(x).shape == (2, 3, 12, 20)


def test_unfold_pixels_places_each_group() -> None:
    x = torch.arange(2 * 3 * 8.0).view(1, 2, 3, 8)
    y = unfold_pixels(x, 2)
    assert y.shape == (1, 4, 6, 2)
    for i in range(4):
        for j in range(6):
            group = (i % 2) * 2 + j % 2
            assert torch.equal(y[0, i, j], x[0, i // 2, j // 2, 2 * group : 2 * group + 2])

"""Swin blocks on maps of any size: windowed attention with relative positions, shifted, padded where a map needs it.

Maps are (B, H, W, C), which is the memory of a channels-last (B, C, H, W): nothing is copied on the way in or out.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.nets import fused


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input.

    Autocast would run it in float32, reading and writing maps of twice the size. The kernel sums in float32 whatever
    its input is, so only the rounding of the output is lost.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x)[1]

    def residual(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + branch, or x alone, to be handed on, and it normalised: on a GPU in bf16 the same pass does both."""
        if fused.usable("layernorm", x, branch) and self.weight.dtype == torch.float32:
            from pclmix.nets.fused import layernorm

            if layernorm.fits(self.weight):
                return layernorm.residual_norm(x, branch, self.weight, self.bias, self.eps)
        x = x if branch is None else x + branch
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return x, F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Linear(nn.Linear):
    """A linear layer with a faster gradient of its bias, where there is one and the type allows it."""

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is not None and fused.usable("linear", input, self.weight, self.bias):
            from pclmix.nets.fused import linear

            if linear.fits(self.weight):
                return linear.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


class WindowAttention(nn.Module):
    """Multi-head attention inside windows of at most `window` x `window` pixels, with a learnt relative bias.

    A side no longer than the window is one window of that length, and is never shifted. Any other side is padded up
    to a multiple of the window; padding is not attended to, and is cut off again. The parameters do not depend on
    the size of the map: a smaller window uses the middle of the bias table.
    """

    def __init__(self, channels: int, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.heads, self.window, self.shifted = heads, window, shifted
        self.qkv = Linear(channels, 3 * channels)
        self.proj = Linear(channels, channels)
        self.bias_table = nn.Parameter(torch.zeros(heads, (2 * window - 1) ** 2))
        nn.init.normal_(self.bias_table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        window = (min(self.window, height), min(self.window, width))
        shift = (self._shift(height), self._shift(width))
        if fused.usable("attention", x):
            from pclmix.nets.fused import attention

            if attention.fits(height, width, window, x.shape[3], self.heads):
                bias = self.relative_bias(window, x.device)
                y: Tensor = self.proj(attention.window_attention(self.qkv(x), bias, self.heads, shift))
                return y
        pad = (-height % window[0], -width % window[1])
        if any(pad):
            x = F.pad(x, (0, 0, 0, pad[1], 0, pad[0]))
        if any(shift):
            x = x.roll((-shift[0], -shift[1]), dims=(1, 2))
        bias = self.bias(height, width, window, shift, x.device)
        x = self.proj(self._attend(self.qkv(x), window, bias))
        if any(shift):
            x = x.roll(shift, dims=(1, 2))
        return x[:, :height, :width]

    def _shift(self, side: int) -> int:
        return self.window // 2 if self.shifted and side > self.window else 0

    def _attend(self, qkv: Tensor, window: tuple[int, int], bias: Tensor) -> Tensor:
        """(B, H, W, 3C) to (B, H, W, C).

        Windows and heads share one axis, so that one bias (windows * heads, n, n) serves the whole batch and is
        never repeated for it: n = pixels of a window.
        """
        batch, height, width, _ = qkv.shape
        rows, columns = height // window[0], width // window[1]
        q, k, v = (
            qkv.view(batch, rows, window[0], columns, window[1], 3, self.heads, -1)
            .permute(5, 0, 1, 3, 6, 2, 4, 7)
            .reshape(3, batch, rows * columns * self.heads, window[0] * window[1], -1)
            .unbind(0)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype).unsqueeze(0))
        return (
            y.reshape(batch, rows, columns, self.heads, window[0], window[1], -1)
            .permute(0, 1, 4, 2, 5, 3, 6)
            .reshape(batch, height, width, -1)
        )

    def bias(
        self, height: int, width: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device
    ) -> Tensor:
        """What is added to the attention scores: (windows * heads, n, n), -inf between pixels that must not meet."""
        relative = self.relative_bias(window, device)
        mask = region_mask(height, width, window, shift, device)
        return (relative + mask.to(relative.dtype)).flatten(0, 1)

    def relative_bias(self, window: tuple[int, int], device: torch.device) -> Tensor:
        """The part of it that is learnt, the same for all windows: (heads, n, n)."""
        n = window[0] * window[1]
        # The gather from the table is a product with a constant of zeros and ones: its backward is another product,
        # where that of indexing would sort or add with atomics.
        with torch.autocast(device.type, enabled=False):
            pairs = relative_positions(window, self.window, device).to(self.bias_table.dtype)
            return (self.bias_table @ pairs).view(self.heads, n, n)


@lru_cache(maxsize=64)
def relative_positions(window: tuple[int, int], full: int, device: torch.device) -> Tensor:
    """Zeros and ones ((2 full - 1)^2, n * n): which entry of the bias table belongs to which pair of pixels.

    Made on the CPU at the first call for a size and kept on the device; a CUDA graph is captured after such a call.
    """
    with torch.inference_mode(False):  # the result is cached, and must serve training too
        row, column = torch.meshgrid(torch.arange(window[0]), torch.arange(window[1]), indexing="ij")
        row, column = row.flatten(), column.flatten()
        span = 2 * full - 1
        index = (row[:, None] - row[None] + full - 1) * span + column[:, None] - column[None] + full - 1
        return F.one_hot(index.flatten(), span * span).T.float().contiguous().to(device)


@lru_cache(maxsize=64)
def region_mask(
    height: int, width: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device
) -> Tensor:
    """0 where two pixels of a window may meet, -inf where not: (windows, 1, n, n).

    After the shift a window at the edge holds pixels of opposite ends of the map, and padding: these are regions, and
    only pixels of one region meet. Padding meets padding, so that no row is empty.
    """
    with torch.inference_mode(False):
        down, right = _regions(height, window[0], shift[0]), _regions(width, window[1], shift[1])
        region = 3 * down[:, None] + right[None]
        rows, columns = len(down) // window[0], len(right) // window[1]
        region = region.view(rows, window[0], columns, window[1]).transpose(1, 2).reshape(rows * columns, -1)
        differs = region[:, :, None] != region[:, None, :]
        return torch.zeros(differs.shape).masked_fill(differs, float("-inf")).unsqueeze(1).to(device)


def _regions(side: int, window: int, shift: int) -> Tensor:
    """Along one axis of the padded and shifted map: 0 in place, 1 came round from the start, 2 padding."""
    padded = side + -side % window
    position = torch.arange(padded) + shift
    return torch.where(position % padded >= side, 2, (position >= padded).long())


class SwinBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), on (B, H, W, C); `drop_path` drops a branch for whole images."""

    def __init__(self, channels: int, heads: int, window: int, shifted: bool, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = LayerNorm(channels)
        self.attention = WindowAttention(channels, heads, window, shifted)
        self.norm2 = LayerNorm(channels)
        self.mlp = nn.Sequential(Linear(channels, 4 * channels), nn.GELU(), Linear(4 * channels, channels))
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.norm1.residual(x)
        x, y = self.norm2.residual(x, self._drop(self.attention(y)))
        return x + self._drop(self.mlp(y))

    def _drop(self, branch: Tensor) -> Tensor:
        if not self.training or self.drop_path == 0.0:
            return branch
        keep = 1.0 - self.drop_path
        return branch * (torch.empty_like(branch[:, :1, :1, :1]).bernoulli_(keep) / keep)

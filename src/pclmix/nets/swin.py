"""Transformer branch: Swin decoder Ft on the encoder's features, and the dual network that PCLMix trains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix import kernels
from pclmix.errors import PclmixError
from pclmix.kernels.ops import fork, linear, norm_act, place_logits, residual_norm, squared_norms
from pclmix.nets.segmenter import Segmenter

WIDTH = 96
HEADS = (3, 6, 12, 24)
WINDOW = 8


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the type of its input (see ops.residual_norm)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x)[1]

    def residual(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + branch, or x alone, and its norm."""
        return residual_norm(x, branch, self.weight, self.bias, self.eps)


class Linear(nn.Linear):
    """nn.Linear by way of ops.linear, whose gradient of the bias is faster on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class WindowAttention(nn.Module):
    """Multi-head attention inside windows of at most `window` x `window` pixels, with a learnt relative bias.

    A side no longer than the window is one window of that length and is not shifted. Any other side is padded to a
    multiple of the window; padding is not attended to and is removed afterwards. The parameters do not depend on the
    size of the map: a smaller window uses the middle of the bias table.
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
        if kernels.usable("attention", x):
            from pclmix.kernels import transformer

            if transformer.fits(height, width, window, x.shape[3], self.heads):
                bias = self.relative_bias(window, x.device)
                y: Tensor = self.proj(transformer.window_attention(self.qkv(x), bias, self.heads, shift))
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

        Windows and heads share one axis, so that one bias (windows * heads, n, n), n pixels a window, broadcasts
        over the batch.
        """
        batch, height, width, _ = qkv.shape
        rows, columns = height // window[0], width // window[1]
        q, k, v = (
            qkv.view(batch, rows, window[0], columns, window[1], 3, self.heads, -1)
            .permute(5, 0, 1, 3, 6, 2, 4, 7)
            .reshape(3, batch, rows * columns * self.heads, window[0] * window[1], -1)
            .unbind(0)
        )
        bias = bias.to(q.dtype)
        if q.device.type == "cpu":  # with a learnt bias torch has no fused attention there: 1.6 to 2.7 times as long
            with torch.autocast("cpu", enabled=False):  # which would compute the softmax in 32 bits
                y: Tensor = (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        return (
            y.reshape(batch, rows, columns, self.heads, window[0], window[1], -1)
            .permute(0, 1, 4, 2, 5, 3, 6)
            .reshape(batch, height, width, -1)
        )

    def bias(
        self, height: int, width: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device
    ) -> Tensor:
        """Bias of the attention scores: (windows * heads, n, n), -inf between pixels that must not attend."""
        relative = self.relative_bias(window, device)
        mask = region_mask(height, width, window, shift, device)
        return (relative + mask.to(relative.dtype)).flatten(0, 1)

    def relative_bias(self, window: tuple[int, int], device: torch.device) -> Tensor:
        """The learnt part of the bias, the same for all windows: (heads, n, n)."""
        n = window[0] * window[1]
        # Indexing the table as a product with a matrix of zeros and ones: its backward is a product too, where that
        # of indexing would sort or use atomics.
        with torch.autocast(device.type, enabled=False):
            pairs = relative_positions(window, self.window, device).to(self.bias_table.dtype)
            return (self.bias_table @ pairs).view(self.heads, n, n)


@lru_cache(maxsize=64)
def relative_positions(window: tuple[int, int], full: int, device: torch.device) -> Tensor:
    """Zeros and ones ((2 full - 1)^2, n * n): which entry of the bias table belongs to which pair of pixels.

    Computed on the CPU at the first call for a size and cached on the device, so before a CUDA graph is captured.
    """
    with torch.inference_mode(False):  # the cached result must be usable in training as well
        row, column = torch.meshgrid(torch.arange(window[0]), torch.arange(window[1]), indexing="ij")
        row, column = row.flatten(), column.flatten()
        span = 2 * full - 1
        index = (row[:, None] - row[None] + full - 1) * span + column[:, None] - column[None] + full - 1
        return (torch.arange(span * span)[:, None] == index.flatten()).float().to(device)


@lru_cache(maxsize=64)
def region_mask(
    height: int, width: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device
) -> Tensor:
    """0 where two pixels of a window may attend to each other, -inf where not: (windows, 1, n, n).

    After the shift a window at the edge holds pixels of opposite sides of the map, and padding: these are regions, and
    pixels attend within their region. Padding attends to padding, so that no row is empty.
    """
    with torch.inference_mode(False):
        down, right = _regions(height, window[0], shift[0]), _regions(width, window[1], shift[1])
        region = 3 * down[:, None] + right[None]
        rows, columns = len(down) // window[0], len(right) // window[1]
        region = region.view(rows, window[0], columns, window[1]).transpose(1, 2).reshape(rows * columns, -1)
        differs = region[:, :, None] != region[:, None, :]
        return torch.zeros(differs.shape).masked_fill(differs, float("-inf")).unsqueeze(1).to(device)


def _regions(side: int, window: int, shift: int) -> Tensor:
    """Along one axis of the padded and shifted map: 0 in place, 1 wrapped around from the start, 2 padding."""
    padded = side + -side % window
    position = torch.arange(padded) + shift
    return torch.where(position % padded >= side, 2, (position >= padded).long())


class SwinBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), on (B, H, W, C)."""

    def __init__(self, channels: int, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.norm1 = LayerNorm(channels)
        self.attention = WindowAttention(channels, heads, window, shifted)
        self.norm2 = LayerNorm(channels)
        self.mlp = nn.Sequential(Linear(channels, 4 * channels), nn.GELU(), Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.norm1.residual(x)
        x, y = self.norm2.residual(x, self.attention(y))
        out: Tensor = x + self.mlp(y)
        return out


class PatchExpand(nn.Module):
    """Each pixel becomes 2 x 2 pixels of half its channels: (B, H, W, C) to (B, 2H, 2W, C/2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = nn.Linear(channels, 2 * channels, bias=False)
        self.norm = LayerNorm(channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(unfold_pixels(self.expand(x), 2))
        return y


class ExpandAndClassify(nn.Module):
    """Patch-expand x4, LayerNorm, 1x1 head: (B, H, W, C) to logits (B, K, 4H, 4W), in float32.

    Computed directly, the expanded map of 16 C channels would be stored, normalised, classified and rearranged, each a
    pass over the largest tensor of the network. This avoids storing it: subtracting a pixel's mean is linear and goes
    into the weight; dividing by its standard deviation is one factor per pixel and goes after the head; the scores are
    then linear in x. Only the norm of each pixel remains to be computed from the expanded map.
    The LayerNorm has no scale and shift of its own: the head has them.
    """

    full_precision = True  # the weights are worked on before they are cast to the type of the features

    def __init__(self, channels: int, classes: int, factor: int = 4, eps: float = 1e-5) -> None:
        super().__init__()
        self.channels, self.classes, self.factor, self.eps = channels, classes, factor, eps
        self.expand = nn.Linear(channels, factor * factor * channels, bias=False)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.expand.weight.view(self.factor**2, self.channels, self.channels)  # place, out, in
            centred = weight - weight.mean(dim=1, keepdim=True)
            scorer = torch.matmul(self.head.weight, centred)  # place, K, in
        scores, norms = F.linear(x, scorer.flatten(0, 1)), squared_norms(x, centred)
        return place_logits(scores, norms, self.head.bias, self.channels, self.eps)


def unfold_pixels(x: Tensor, factor: int) -> Tensor:
    """(B, H, W, f*f*C) to (B, f*H, f*W, C): the channels of a pixel, in f x f groups, become its f x f pixels."""
    batch, height, width, _ = x.shape
    x = x.view(batch, height, width, factor, factor, -1).transpose(2, 3)
    return x.reshape(batch, height * factor, width * factor, -1)


class SwinDecoder(nn.Module):
    """Encoder features (strides 4, 8, 16, 32 are read) to logits (B, K, H, W), for sides that are multiples of 32.

    Features are projected to 96, 192, 384, 768 channels (`width` times 1, 2, 4, 8). From the coarsest on: two Swin
    blocks (heads 24, 12, 6, 3; window 8; the second shifted where the map is larger than the window), patch-expand
    x2, and a linear fusion with the next feature. After the last pair patch-expand x4 and a 1x1 head.
    """

    strides = (4, 8, 16, 32)

    def __init__(self, channels: Sequence[int], classes: int, width: int = WIDTH) -> None:
        super().__init__()
        if width % (2 * HEADS[0]):
            raise PclmixError(f"the transformer decoder's width is {width}; it must be a multiple of {2 * HEADS[0]}")
        widths = [width * 2**level for level in range(4)]
        self.project = nn.ModuleList(Linear(a, b) for a, b in zip(channels[-4:], widths, strict=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                SwinBlock(own, heads, WINDOW, shifted=False),
                SwinBlock(own, heads, WINDOW, shifted=True),
            )
            for own, heads in zip(widths, HEADS, strict=True)
        )
        self.expand = nn.ModuleList(PatchExpand(own) for own in widths[1:])
        self.fuse = nn.ModuleList(nn.Linear(2 * own, own) for own in widths[:-1])
        self.final = ExpandAndClassify(widths[0], classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        # Permuted before the projection: a view where the feature is channels-last.
        maps = [f.permute(0, 2, 3, 1) for f in features[-4:]]
        x = self.blocks[-1](self.project[-1](maps[-1]))
        for level in (2, 1, 0):
            skip = self.project[level](maps[level])
            x = self.fuse[level](torch.cat([self.expand[level](x), skip], dim=-1))
            x = self.blocks[level](x)
        logits: Tensor = self.final(x)
        return logits


CONTRAST_STRIDE = 8
EMBEDDING_WIDTH = 256


class EmbeddingHead(nn.Module):
    """Stride-8 feature (B, C, H/8, W/8) to unit embeddings (B, D, H/8, W/8): 1x1 conv, BN, ReLU, 1x1 conv, L2 norm.

    The hidden layer is as wide as the feature it reads. Embeddings come back in float32, since their cosines are
    divided by a small temperature.
    """

    def __init__(self, channels: int, width: int = EMBEDDING_WIDTH) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, width, 1),
        )

    def forward(self, feature: Tensor) -> Tensor:
        hide, norm, _, embed = self.project
        return F.normalize(embed(norm_act(norm, hide(feature))).float(), dim=1)


class DualOutput(NamedTuple):
    """Equation 2 before the softmax: logits of both decoders, and unit embeddings of the first images."""

    logits_c: Tensor  # (B, K, H, W)
    logits_t: Tensor  # (B, K, H, W)
    embeddings: Tensor  # (embed, D, H/8, W/8)


def forward_dual(net: Segmenter, aux: SwinDecoder, head: EmbeddingHead, x: Tensor, embed: int) -> DualOutput:
    """Equation 2, (p_c, p_t) = F(x), before the softmax; embeddings of the first `embed` images, the unmixed ones."""
    readers = [fork(feature, len(x), len(x), embed) for feature in net.features(x)]
    for_c, for_t, for_head = zip(*readers, strict=True)
    stride8 = for_head[net.encoder.strides.index(CONTRAST_STRIDE)]
    return DualOutput(net.decode(for_c), aux(for_t), head(stride8))


def build_auxiliary(
    net: Segmenter,
    classes: int,
    embedding_width: int = EMBEDDING_WIDTH,
    swin_width: int = WIDTH,
) -> tuple[SwinDecoder, EmbeddingHead]:
    """The modules that training adds to `net`: transformer decoder and embedding head on its encoder's features."""
    strides, channels = net.encoder.strides, net.encoder.channels
    if strides[-4:] != SwinDecoder.strides:
        raise PclmixError("this network has no features at strides 4 to 32, which PCLMix needs: set net= to a resnet")
    aux = SwinDecoder(channels, classes, swin_width)
    return aux, EmbeddingHead(channels[strides.index(CONTRAST_STRIDE)], embedding_width)

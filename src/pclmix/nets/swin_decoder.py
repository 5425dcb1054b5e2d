"""Transformer decoder Ft: Swin blocks on the encoder's features at strides 32 to 4, then x4 to the image's size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.errors import PclmixError
from pclmix.nets import fused
from pclmix.nets.swin_block import LayerNorm, Linear, SwinBlock

WIDTH = 96
HEADS = (3, 6, 12, 24)
WINDOW = 8


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

    Written as it stands, the 16-fold map is normalised, stored, classified and moved to its place, each a pass over the
    largest tensor of the whole network. The same numbers come cheaper: subtracting a pixel's mean is linear, so it goes
    into the weight; dividing by its standard deviation is one factor for the pixel, so it goes after the head; the
    head's scores are linear in x, so they need no large map at all. What is left of that map is its norm.
    The LayerNorm has no scale and shift of its own: the head that follows has them.
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
        if fused.usable("logits", scores) and norms.dtype == torch.float32:
            from pclmix.nets.fused.logits import place_logits

            return place_logits(scores, norms, self.head.bias, self.channels, self.eps)
        batch, height, width, _ = x.shape
        scores = scores.view(batch, height, width, -1, self.classes)
        with torch.autocast(x.device.type, enabled=False):
            logits = scores * torch.rsqrt(norms.unsqueeze(-1) / self.channels + self.eps) + self.head.bias
        # To its place and to the order of axes that the losses want, in one copy.
        logits = logits.view(batch, height, width, self.factor, self.factor, -1).permute(0, 5, 1, 3, 2, 4)
        return logits.reshape(batch, -1, height * self.factor, width * self.factor)


def squared_norms(x: Tensor, matrices: Tensor) -> Tensor:
    """|E_s x|^2 of each pixel x of a map (B, H, W, C) and each matrix of (S, C, C): (B, H, W, S)."""
    if fused.usable("squared_norm", x):
        from pclmix.nets.fused import squared_norm

        if squared_norm.fits(matrices):
            return squared_norm.squared_norms(x, matrices)
    products = F.linear(x, matrices.flatten(0, 1)).view(*x.shape[:3], -1, x.shape[3])
    with torch.autocast(x.device.type, enabled=False):
        norms: Tensor = torch.linalg.vector_norm(products, dim=-1).to(matrices.dtype)
    return norms.square()


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

    `drop_path` is the rate of the finest stage's last block, growing linearly from 0 at the first one.
    `absolute_position` adds a learnt 8 x 8 grid to the coarsest map, resized to it where the image is not 256 x 256.
    """

    strides = (4, 8, 16, 32)

    def __init__(
        self,
        channels: Sequence[int],
        classes: int,
        drop_path: float = 0.0,
        absolute_position: bool = False,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        if width % (2 * HEADS[0]):
            raise PclmixError(f"the transformer decoder's width is {width}; it must be a multiple of {2 * HEADS[0]}")
        widths = [width * 2**level for level in range(4)]
        rates = torch.linspace(0, drop_path, 2 * len(widths), device="cpu").view(-1, 2).tolist()
        self.project = nn.ModuleList(Linear(a, b) for a, b in zip(channels[-4:], widths, strict=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                SwinBlock(own, heads, WINDOW, shifted=False, drop_path=first),
                SwinBlock(own, heads, WINDOW, shifted=True, drop_path=second),
            )
            for own, heads, (first, second) in zip(widths, HEADS, reversed(rates), strict=True)
        )
        self.expand = nn.ModuleList(PatchExpand(own) for own in widths[1:])
        self.fuse = nn.ModuleList(nn.Linear(2 * own, own) for own in widths[:-1])
        self.final = ExpandAndClassify(widths[0], classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.position: nn.Parameter | None = None
        if absolute_position:
            self.position = nn.Parameter(torch.zeros(1, widths[-1], 8, 8))
            nn.init.normal_(self.position, std=0.02)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        # A view where the feature is channels-last, which is why it is permuted before the projection and not after.
        maps = [f.permute(0, 2, 3, 1) for f in features[-4:]]
        x = self.project[-1](maps[-1])
        if self.position is not None:
            grid = F.interpolate(self.position, size=x.shape[1:3], mode="bilinear", align_corners=False)
            x = x + grid.permute(0, 2, 3, 1).to(x.dtype)
        x = self.blocks[-1](x)
        for level in (2, 1, 0):
            skip = self.project[level](maps[level])
            x = self.fuse[level](torch.cat([self.expand[level](x), skip], dim=-1))
            x = self.blocks[level](x)
        logits: Tensor = self.final(x)
        return logits

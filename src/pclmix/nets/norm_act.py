"""What a CNN is made of: a convolution, its normalisation, the addition of a shortcut, the ReLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pclmix.nets import fused


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """conv(x), (B, C, H, W). On a GPU in bf16 a 1x1 convolution of a channels-last map is one matrix product."""
    if isinstance(conv, nn.Conv2d) and _is_product(conv, x):
        # Both permutations are views: memory is in that order already.
        return F.linear(x.permute(0, 2, 3, 1), conv.weight.flatten(1)).permute(0, 3, 1, 2)
    y: Tensor = conv(x)
    return y


def _is_product(conv: nn.Conv2d, x: Tensor) -> bool:
    if conv.kernel_size != (1, 1) or conv.stride != (1, 1) or conv.padding != (0, 0):
        return False
    plain = conv.groups == 1 and conv.bias is None
    return plain and fused.usable("pointwise", x, conv.weight) and fused.channels_last(x)


def norm_act(norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
    """relu(norm(x) + residual), (B, C, H, W).

    A BatchNorm in training on one GPU runs as one operation; any other module, such as a BatchNorm over several
    processes or none at all after folding, as it is.
    """
    return norm_act_for(1, norm, x, residual, relu)[0]


def norm_act_for(
    readers: int, norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True
) -> tuple[Tensor, ...]:
    """norm_act's result for each of at most three readers; as one operation, it adds their gradients, too."""
    if _fusable(norm, x, residual):
        from pclmix.nets.fused.batchnorm import batch_norm_act

        assert isinstance(norm, nn.BatchNorm2d)
        return batch_norm_act(x, residual, norm, relu, readers)
    y: Tensor = norm(x)
    if residual is not None:
        y += residual
    return (F.relu_(y) if relu else y,) * readers


def _fusable(norm: nn.Module, x: Tensor, residual: Tensor | None) -> bool:
    if type(norm) is not nn.BatchNorm2d or not norm.training or not fused.usable("batchnorm", x, residual):
        return False
    from pclmix.nets.fused.batchnorm import fits

    kept = norm.affine and norm.track_running_stats and norm.momentum is not None
    return kept and fused.channels_last(x, residual) and fits(x)


class ConvNormReLU(nn.Sequential):
    """A convolution, its normalisation and a ReLU, under the names 0, 1 and 2."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU(inplace=True))

    def forward(self, input: Tensor) -> Tensor:
        return norm_act(self[1], self[0](input))

"""BatchNorm folded into the convolution before it: the same function with one operation less a layer."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fold_batchnorm(module: nn.Module) -> nn.Module:
    """Fold, in place, every BatchNorm that follows a convolution; returns the module, in evaluation mode.

    Followers are told by position in a Sequential, elsewhere by name: `bn1` follows `conv1`, as in every ResNet.
    Equal to the original up to rounding. The result is for prediction: it cannot be trained on or saved over.
    """
    module.eval()
    for parent in module.modules():
        children = dict(parent.named_children())
        if isinstance(parent, nn.Sequential):
            pairs = list(pairwise(children))
        else:
            pairs = [(name, name.replace("conv", "bn")) for name in children if name.startswith("conv")]
        for first, second in pairs:
            conv, norm = children[first], children.get(second)
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, first, fuse_conv_bn_eval(conv, norm))
                setattr(parent, second, nn.Identity())
    return module

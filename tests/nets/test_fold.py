"""BatchNorm folded into convolutions changes nothing but the number of operations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pclmix.nets.segmenter import NETS, build_segmenter, fold_batchnorm


@pytest.mark.parametrize("name", NETS.names())
def test_folded_network_is_the_same_function(name: str) -> None:
    torch.manual_seed(0)
    net = build_segmenter(name, 2, 3)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    net.eval()
    x = torch.rand(2, 2, 64, 64)
    with torch.no_grad():
        folded = fold_batchnorm(copy.deepcopy(net))
        expected = net(x)
        torch.testing.assert_close(folded(x), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())

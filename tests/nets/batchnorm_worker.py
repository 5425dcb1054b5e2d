"""One process of test_batchnorm.py: its share of a batch through a synchronised network, results to a file.

Usage: python batchnorm_worker.py RANK WORLD RENDEZVOUS_FILE IN.pt OUT.pt
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from pclmix.training.parallel import ReducedBatchNorm, synchronise_batchnorm


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 1), nn.BatchNorm2d(3))


def main(rank: int, world: int, rendezvous: str, source: str, target: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    shares = torch.load(source, weights_only=True)
    plain = network()
    keys = list(plain.state_dict())
    net = synchronise_batchnorm(plain)
    assert list(net.state_dict()) == keys
    assert sum(isinstance(module, ReducedBatchNorm) for module in net.modules()) == 2
    outputs, gradients = [], []
    for share in shares[rank]:
        x = share.clone().requires_grad_()
        y = net(x)
        y.square().sin().sum().backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    weights = {name: parameter.grad for name, parameter in net.named_parameters()}
    for gradient in weights.values():
        dist.all_reduce(gradient)
    net.eval()
    still = net(shares[rank][0]).detach()
    torch.save({"y": outputs, "x": gradients, "w": weights, "state": net.state_dict(), "eval": still}, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

"""BatchNorm over two processes equals plain BatchNorm on the concatenated batch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from pclmix.training.parallel import ReducedBatchNorm, synchronise_batchnorm

WORKER = Path(__file__).with_name("batchnorm_worker.py")


def plain_network() -> nn.Sequential:
    spec = importlib.util.spec_from_file_location("batchnorm_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net: nn.Sequential = module.network()
    return net


def test_two_processes_equal_one_with_the_whole_batch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    # Two steps; the processes hold different numbers of images, far from zero mean.
    counts = [[3, 2], [1, 2]]
    shares = [[torch.randn(n, 2, 6, 6) + 4 for n in steps] for steps in counts]
    torch.save(shares, tmp_path / "in.pt")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path / "meet"), str(tmp_path / "in.pt"), str(out)],
            env=environment,
        )
        for rank, out in enumerate([tmp_path / "0.pt", tmp_path / "1.pt"])
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))

    net = plain_network()
    for step in (0, 1):
        x = torch.cat([shares[0][step], shares[1][step]]).requires_grad_()
        y = net(x)
        y.square().sin().sum().backward()
        torch.testing.assert_close(torch.cat([first["y"][step], second["y"][step]]), y.detach())
        assert x.grad is not None
        torch.testing.assert_close(torch.cat([first["x"][step], second["x"][step]]), x.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(first["w"][name], parameter.grad, rtol=1e-4, atol=1e-4)
    for key, value in net.state_dict().items():
        torch.testing.assert_close(first["state"][key], value)
        assert torch.equal(first["state"][key], second["state"][key])
    net.eval()
    torch.testing.assert_close(first["eval"], net(shares[0][0]).detach())


def test_one_process_keeps_batchnorm() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    assert synchronise_batchnorm(net) is net
    assert type(net[1]) is nn.BatchNorm2d


def test_reduced_batchnorm_alone_is_batchnorm() -> None:
    plain = nn.BatchNorm2d(3, momentum=None)
    ours = ReducedBatchNorm.like(nn.BatchNorm2d(3, momentum=None))
    for _ in range(3):
        x = torch.randn(2, 3, 4, 4)
        torch.testing.assert_close(ours(x), plain(x))
        assert ours(x.bfloat16()).dtype == torch.bfloat16
        plain(x.bfloat16())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-4, atol=1e-4)

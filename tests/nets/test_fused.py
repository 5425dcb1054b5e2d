"""Each fused operation against the plain operations that define it: on a GPU in bf16, else interpreted in float32.

Without Triton nothing of this can run, and nothing of it is used.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton")

from pclmix.engine.cast import cast_weights  # noqa: E402
from pclmix.nets.dual import build_dual  # noqa: E402
from pclmix.nets.fused import (  # noqa: E402
    attention,
    batchnorm,
    fork,
    layernorm,
    linear,
    logits,
    plain,
    squared_norm,
    upsample,
)
from pclmix.nets.swin_block import WindowAttention  # noqa: E402

DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    x = torch.randn(*shape, device=DEVICE).to(dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def compare(fused: Tensor, plain: Tensor, leaves: list[Tensor]) -> None:
    """Same values, and same gradients of the leaves for one drawn gradient of the result."""
    gradient = torch.randn_like(plain)
    wanted = torch.autograd.grad(plain, leaves, gradient)
    given = torch.autograd.grad(fused, leaves, gradient.to(fused.dtype))
    for a, b in zip([fused, *given], [plain, *wanted], strict=True):
        # Relative to the largest value: bf16 rounds each value, and sums of many of them, both ways of computing.
        assert a.shape == b.shape
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error < (2e-2 if CUDA else 1e-4), error


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("channels", "skip"), [(64, 32), (32, None)])
def test_upsample(channels: int, skip: int | None) -> None:
    x, other = rand(2, channels, 3, 5), None if skip is None else rand(2, skip, 6, 10)
    plain = F.interpolate(x, scale_factor=2.0, mode="nearest")
    if other is not None:
        plain = torch.cat([plain, other], dim=1)
    compare(upsample.upsample_concat(x, other), plain, [x] if other is None else [x, other])


@pytest.mark.parametrize("read", [(0, 1, 2), (0, 2), (2,), (1,)])
def test_fork(read: tuple[int, ...]) -> None:
    """Some readers, the last one of fewer images; a reader that is not asked has no gradient."""
    x, counts = rand(5, 16, 6, 7), (5, 5, 2)
    views = fork.fork(x, counts)
    factors = [torch.randn(count, 16, 6, 7, device=DEVICE) for count in counts]
    fused = torch.autograd.grad(sum((views[r] * factors[r]).sum() for r in read), x)[0]
    plain = torch.autograd.grad(sum((x[: counts[r]] * factors[r]).sum() for r in read), x)[0]
    assert fused.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(fused, plain, rtol=2e-2 if CUDA else 1e-5, atol=5e-2 if CUDA else 1e-5)


@pytest.mark.parametrize("channels", [16, 64, 128])
@pytest.mark.parametrize(("add", "relu"), [(True, True), (False, True), (False, False)])
def test_batchnorm(channels: int, add: bool, relu: bool) -> None:
    norm, other = (nn.BatchNorm2d(channels).to(DEVICE) for _ in range(2))
    for layer in (norm, other):
        nn.init.uniform_(layer.weight, 0.5, 2)
        nn.init.uniform_(layer.bias, -1, 1)
    other.load_state_dict(norm.state_dict())
    x = (rand(3, channels, 10, 12) * 2 + 30).detach().requires_grad_()
    residual = rand(3, channels, 10, 12) if add else None
    fused = batchnorm.batch_norm_act(x, residual, norm, relu)[0]
    # Plain in float32: in bf16 a ReLU would cut differently rounded values differently.
    plain = other(x.float()) if residual is None else other(x.float()) + residual.float()
    leaves = [x] if residual is None else [x, residual]
    gradient = torch.randn_like(plain)
    plain = plain.relu() if relu else plain
    wanted = torch.autograd.grad(plain, [*leaves, other.weight, other.bias], gradient)
    given = torch.autograd.grad(fused, [*leaves, norm.weight, norm.bias], gradient.to(fused.dtype))
    for a, b in zip([fused, *given], [plain, *wanted], strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < (2e-2 if CUDA else 1e-4), error
    for key, value in norm.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("read", [(0, 1, 2), (0, 2), (1,)])
def test_batchnorm_for_readers(add: bool, read: tuple[int, ...]) -> None:
    norm = nn.BatchNorm2d(64).to(DEVICE)
    nn.init.uniform_(norm.bias, -1, 1)
    x, residual = rand(3, 64, 10, 12), rand(3, 64, 10, 12) if add else None
    maps = batchnorm.batch_norm_act(x, residual, norm, True, 3)
    plain = norm(x.float()) if residual is None else norm(x.float()) + residual.float()
    factors = [torch.randn_like(plain) for _ in range(3)]
    leaves = [x, norm.weight, norm.bias] + ([] if residual is None else [residual])
    given = torch.autograd.grad(sum((maps[r] * factors[r]).sum() for r in read), leaves)
    wanted = torch.autograd.grad(sum((plain.relu() * factors[r]).sum() for r in read), leaves)
    for a, b in zip(given, wanted, strict=True):
        assert (a.double() - b.double()).norm() / b.double().norm() < (2e-2 if CUDA else 1e-4)


def test_batchnorm_of_a_far_mean_does_not_cancel() -> None:
    norm = nn.BatchNorm2d(16).to(DEVICE)
    x = (torch.randn(4, 16, 8, 8, device=DEVICE) + 1000).contiguous(memory_format=torch.channels_last)
    y = batchnorm.batch_norm_act(x, None, norm, False)[0]
    torch.testing.assert_close(y, F.batch_norm(x.double(), None, None, training=True).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("size", "shifted"), [((16, 24), True), ((16, 8), True), ((8, 8), False)])
def test_window_attention(size: tuple[int, int], shifted: bool) -> None:
    layer = WindowAttention(64, 2, 8, shifted).to(DEVICE)
    nn.init.normal_(layer.bias_table)
    shift = tuple(4 if shifted and side > 8 else 0 for side in size)
    qkv = rand(2, *size, 192).detach().contiguous().requires_grad_()
    bias = layer.bias(*size, (8, 8), shift, torch.device(DEVICE))
    rolled = qkv.float().roll((-shift[0], -shift[1]), (1, 2))
    plain = layer._attend(rolled, (8, 8), bias).roll(shift, (1, 2))
    relative = layer.relative_bias((8, 8), torch.device(DEVICE))
    compare(attention.window_attention(qkv, relative, 2, shift), plain, [qkv, layer.bias_table])


def test_squared_norms() -> None:
    x, matrices = rand(2, 9, 10, 24).detach().contiguous().requires_grad_(), rand(3, 24, 24, dtype=torch.float32)
    plain = (x.float()[..., None, None, :] * matrices).sum(-1).square().sum(-1)
    compare(squared_norm.squared_norms(x, matrices), plain, [x, matrices])


@pytest.mark.parametrize("classes", [4, 3])
def test_logits(classes: int) -> None:
    scores = rand(2, 5, 7, 16 * classes).detach().contiguous().requires_grad_()
    norms, bias = (rand(16, 70, dtype=torch.float32).square().detach().requires_grad_(), rand(classes).float())
    bias = bias.detach().requires_grad_()
    map_of_norms = norms.T.view(2, 5, 7, 16)
    plain = scores.view(2, 5, 7, 16, classes) * torch.rsqrt(map_of_norms.unsqueeze(-1) / 8 + 0.1) + bias
    plain = plain.view(2, 5, 7, 4, 4, classes).permute(0, 5, 1, 3, 2, 4).reshape(2, classes, 20, 28)
    compare(logits.place_logits(scores, map_of_norms, bias, 8, 0.1), plain, [scores, norms, bias])


@pytest.mark.parametrize("channels", [96, 48])
def test_layer_norm(channels: int) -> None:
    x = rand(2, 5, 7, channels).detach().contiguous().requires_grad_()
    weight, bias = rand(channels, dtype=torch.float32), rand(channels, dtype=torch.float32)
    plain = F.layer_norm(x.float(), (channels,), weight, bias, 1e-5)
    compare(layernorm.layer_norm(x, weight, bias, 1e-5), plain, [x, weight, bias])


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("read", [(0, 1), (0,), (1,)])
def test_residual_norm(add: bool, read: tuple[int, ...]) -> None:
    x, branch = (rand(2, 5, 7, 96).detach().contiguous().requires_grad_() for _ in range(2))
    weight, bias = rand(96, dtype=torch.float32), rand(96, dtype=torch.float32)
    total = x + branch if add else x
    both = total, F.layer_norm(total.float(), (96,), weight, bias, 1e-5)
    ours = layernorm.residual_norm(x, branch if add else None, weight, bias, 1e-5)
    leaves = [x, *([branch] if add else []), *([weight, bias] if 1 in read else [])]
    compare(*(torch.cat([pair[r].float().flatten() for r in read]) for pair in (ours, both)), leaves)


def test_linear() -> None:
    x, weight, bias = rand(700, 24), rand(96, 24), rand(96)
    compare(linear.linear(x, weight, bias), F.linear(x.float(), weight.float(), bias.float()), [x, weight, bias])


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_whole_network_is_as_exact_as_plain_bf16() -> None:
    """Against float32, output and gradients are no further off than those of plain operations in bf16."""
    model = build_dual("resnet50", 1, 4).to(DEVICE, memory_format=torch.channels_last).train()
    x = torch.randn(6, 1, 128, 128, device=DEVICE).contiguous(memory_format=torch.channels_last)

    def run(bf16: bool, fused: bool) -> list[Tensor]:
        model.zero_grad()
        cast = cast_weights(model, torch.bfloat16) if bf16 else nullcontext()
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=bf16, cache_enabled=False)
        with autocast, cast, nullcontext() if fused else plain():
            outs = model(x, 2)
        sum(out.float().square().mean() for out in outs).backward()
        return [*(out.detach() for out in outs), *(p.grad for p in model.parameters() if p.grad is not None)]

    exact, fused, usual = run(False, False), run(True, True), run(True, False)
    error = [
        [((a - b).norm() / b.norm()).item() for a, b in zip(given, exact, strict=True)] for given in (fused, usual)
    ]
    assert torch.tensor(error[0]).median() < 1.25 * torch.tensor(error[1]).median()
    assert max(error[0][:3]) < 1.5 * max(error[1][:3])

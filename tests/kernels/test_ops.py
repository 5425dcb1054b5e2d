"""Each operation with its kernels against its plain definition: on a GPU in bf16, else interpreted in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreted
from torch import Tensor, nn

from pclmix import kernels
from pclmix.kernels import ops
from pclmix.methods.pclmix import pixel_terms
from pclmix.nets.swin import WindowAttention

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
#: bf16 rounds each value, and sums of many of them, in both ways of computing.
TOLERANCE = 2e-2 if CUDA else 1e-4


@pytest.fixture(autouse=True)
def with_kernels() -> Iterator[None]:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    with nullcontext() if CUDA else interpreted():
        yield


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """A leaf; a map of four axes is (B, C, H, W) in channels-last order."""
    x = torch.randn(*shape, device=DEVICE).to(dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def rows(*shape: int) -> Tensor:
    """A leaf whose last axis is contiguous."""
    return torch.randn(*shape, device=DEVICE).to(DTYPE).requires_grad_()


def nodes(outputs: Sequence[Tensor]) -> set[str]:
    """The names of all autograd functions behind the outputs."""
    waiting, seen = [x.grad_fn for x in outputs if x.grad_fn is not None], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return {node.name() for node in seen}


def compare(
    node: str,
    work: Callable[..., Tensor | tuple[Tensor, ...]],
    leaves: list[Tensor],
    parameters: Sequence[Tensor] = (),
    read: Sequence[int] = (0,),
) -> None:
    """Outputs and gradients with kernels, whose autograd function is `node`, against plain torch in float32.

    Only the outputs `read` have gradients.
    """

    def run(leaves: list[Tensor]) -> tuple[list[Tensor], set[str]]:
        outputs = work(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        chosen = [outputs[number] for number in read]
        factors = [
            torch.randn(x.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) for x in chosen
        ]
        loss = torch.stack([(x.float() * f).sum() for x, f in zip(chosen, factors, strict=True)]).sum()
        gradients = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
        return [*chosen, *(g for g in gradients if g is not None)], nodes(outputs)

    exact = [x.detach().float().requires_grad_() for x in leaves]
    with kernels.plain():
        wanted, plain_nodes = run(exact)
    given, fused_nodes = run(leaves)
    assert f"{node}Backward" in fused_nodes
    assert f"{node}Backward" not in plain_nodes
    for a, b in zip(given, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() / b.double().norm() < TOLERANCE


@pytest.mark.parametrize(("channels", "skip"), [(64, 32), (32, None)])
def test_upsample_concat(channels: int, skip: int | None) -> None:
    maps = [rand(2, channels, 3, 5)] + ([] if skip is None else [rand(2, skip, 6, 10)])
    compare("_UpsampleConcat", lambda x, skip=None: ops.upsample_concat(x, skip), maps)


@pytest.mark.parametrize("read", [(0, 1, 2), (0, 2), (2,), (1,)])
def test_fork(read: tuple[int, ...]) -> None:
    """Some readers, the last one of fewer images; a reader that is not used has no gradient."""
    compare("_Fork", lambda x: ops.fork(x, 5, 5, 2), [rand(5, 16, 6, 7)], read=read)


@pytest.mark.parametrize("channels", [16, 64, 128])
@pytest.mark.parametrize(("add", "relu"), [(True, True), (False, True), (False, False)])
def test_norm_act(channels: int, add: bool, relu: bool) -> None:
    norm, copy = (nn.BatchNorm2d(channels).to(DEVICE) for _ in range(2))
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    copy.load_state_dict(norm.state_dict())
    x = (rand(3, channels, 10, 12) * 2 + 30).detach().requires_grad_()
    maps = [x, rand(3, channels, 10, 12)] if add else [x]
    compare("_BatchNormAct", lambda x, r=None: ops.norm_act(norm, x, r, relu), maps, [norm.weight, norm.bias])
    for _ in range(2):  # `compare` has run twice
        copy(x.detach().float())
    for key, value in norm.state_dict().items():
        torch.testing.assert_close(value, copy.state_dict()[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("read", [(0, 1, 2), (0, 2), (1,)])
def test_norm_act_for_readers(add: bool, read: tuple[int, ...]) -> None:
    norm = nn.BatchNorm2d(64).to(DEVICE)
    nn.init.uniform_(norm.bias, -1, 1)
    maps = [rand(3, 64, 10, 12) for _ in range(1 + add)]
    work = lambda x, r=None: ops.norm_act_for(3, norm, x, r)  # noqa: E731
    compare("_BatchNormAct", work, maps, [norm.weight, norm.bias], read)


def test_norm_act_of_a_large_mean_does_not_cancel() -> None:
    norm = nn.BatchNorm2d(16).to(DEVICE)
    x = (torch.randn(4, 16, 8, 8, device=DEVICE) + 1000).to(DTYPE).contiguous(memory_format=torch.channels_last)
    y = ops.norm_act(norm, x.requires_grad_(), relu=False)
    assert "_BatchNormActBackward" in nodes([y])
    wanted = F.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("size", "shifted"), [((16, 24), True), ((16, 8), True), ((8, 8), False)])
def test_window_attention(size: tuple[int, int], shifted: bool) -> None:
    layer = WindowAttention(64, 2, 8, shifted).to(DEVICE)
    nn.init.normal_(layer.bias_table)
    layer.to(DTYPE).bias_table.data = layer.bias_table.data.float()

    def work(x: Tensor) -> Tensor:
        y: Tensor = layer.to(x.dtype)(x)
        return y

    compare("_WindowAttention", work, [rows(2, *size, 64)], list(layer.parameters()))


def test_squared_norms() -> None:
    matrices = torch.randn(3, 24, 24, device=DEVICE, requires_grad=True)
    compare("_SquaredNorms", lambda x: ops.squared_norms(x, matrices), [rows(2, 9, 10, 24)], [matrices])


@pytest.mark.parametrize("classes", [4, 3])
def test_place_logits(classes: int) -> None:
    bias, norms = (torch.randn(*shape, device=DEVICE) for shape in ((classes,), (16, 70)))
    norms = norms.square().T.reshape(2, 5, 7, 16)
    leaves = [bias.requires_grad_(), norms.requires_grad_()]
    work = lambda scores: ops.place_logits(scores, norms, bias, 8, 0.1)  # noqa: E731
    compare("_PlaceLogits", work, [rows(2, 5, 7, 16 * classes)], leaves)


@pytest.mark.parametrize(("channels", "add"), [(96, True), (96, False), (48, False)])
@pytest.mark.parametrize("read", [(0, 1), (0,), (1,)])
def test_residual_norm(channels: int, add: bool, read: tuple[int, ...]) -> None:
    weight, bias = (torch.randn(channels, device=DEVICE, requires_grad=True) for _ in range(2))
    maps = [rows(2, 5, 7, channels) for _ in range(1 + add)]
    compare("_ResidualNorm", lambda x, b=None: ops.residual_norm(x, b, weight, bias, 1e-5), maps, [weight, bias], read)


def test_linear() -> None:
    compare("_Linear", ops.linear, [rows(700, 24), rows(96, 24), rows(96)])


@pytest.mark.parametrize(
    ("shape", "channels", "radius"), [((2, 4, 16, 24), 1, 2), ((1, 3, 9, 7), 2, 5), ((1, 2, 1, 3), 1, 2)]
)
def test_crf_message(shape: tuple[int, ...], channels: int, radius: int) -> None:
    from pclmix.kernels import losses

    p = torch.randn(shape, device=DEVICE).softmax(1)
    image = torch.rand(shape[0], channels, *shape[2:], device=DEVICE)
    with kernels.plain():
        wanted = ops.crf_message(p, image, 3.0, 0.2, radius)
    for message in (losses.crf_message, ops.crf_message):
        torch.testing.assert_close(message(p, image, 3.0, 0.2, radius), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [4, 3])
@pytest.mark.parametrize("case", ["usual", "nothing drawn", "erased", "erased image"])
def test_pixel_terms(classes: int, case: str) -> None:
    shape = (6, classes, 32, 32)
    c = (3 * torch.randn(shape, device=DEVICE)).to(DTYPE).contiguous(memory_format=torch.channels_last)
    t = (3 * torch.randn(shape, device=DEVICE)).to(DTYPE)
    labels = [torch.randint(-3, classes, (2, 32, 32), device=DEVICE).clamp(min=-1) for _ in range(3)]
    p12, p21 = (torch.randn(2, classes, 32, 32, device=DEVICE).softmax(1) for _ in range(2))
    if case == "nothing drawn":
        labels[1].fill_(-1)
    if case == "erased":
        p12[:, :, 4:9, 7:20] = 0
    if case == "erased image":
        p21[0] = 0
    leaves = [c.requires_grad_(), t.requires_grad_()]
    work = lambda c, t: tuple(pixel_terms(c, t, labels, (p12, p21), 0.4, 0.3))  # noqa: E731
    compare("_PixelTerms", work, leaves, read=(0, 1, 2))


@pytest.mark.parametrize("operation", kernels.OPERATIONS)
def test_an_operation_can_be_switched_off(operation: str) -> None:
    x = rand(2, 32, 4, 4)
    assert kernels.usable(operation, x)
    with kernels.plain(operation):
        assert not kernels.usable(operation, x)
    assert kernels.usable(operation, x, None)
    assert not kernels.usable(operation, x.double())

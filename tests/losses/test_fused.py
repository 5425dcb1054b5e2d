"""The fused pixel terms against the plain functions that define them: on a GPU, else interpreted.

Without Triton nothing of this can run, and nothing of it is used.
"""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton")

from pclmix.losses import fused, fused_crf  # noqa: E402
from pclmix.losses.gated_crf import filtered  # noqa: E402
from pclmix.losses.pixel_terms import pixel_terms  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"


@pytest.mark.parametrize("classes", [4, 3])
@pytest.mark.parametrize("case", ["usual", "nothing drawn", "erased", "erased image"])
def test_pixel_terms(classes: int, case: str) -> None:
    torch.manual_seed(0)
    shape = (6, classes, 32, 32)
    c = (3 * torch.randn(shape, device=DEVICE)).contiguous(memory_format=torch.channels_last).requires_grad_()
    t = (3 * torch.randn(shape, device=DEVICE)).requires_grad_()
    labels = [torch.randint(-3, classes, (2, 32, 32), device=DEVICE).clamp(min=-1) for _ in range(3)]
    p12, p21 = (torch.randn(2, classes, 32, 32, device=DEVICE).softmax(1) for _ in range(2))
    if case == "nothing drawn":
        labels[1].fill_(-1)
    if case == "erased":
        p12[:, :, 4:9, 7:20] = 0
    if case == "erased image":
        p21[0] = 0
    given = fused.pixel_terms(c, t, labels, (p12, p21), 0.4, 0.3)
    wanted = pixel_terms(c, t, labels, (p12, p21), 0.4, 0.3)
    weights = torch.tensor([1.0, 0.5, 2.0], device=DEVICE)
    ours = torch.autograd.grad((torch.stack(tuple(given)) * weights).sum(), [c, t])
    theirs = torch.autograd.grad((torch.stack(tuple(wanted)) * weights).sum(), [c, t])
    torch.testing.assert_close(tuple(given), tuple(wanted), rtol=1e-5, atol=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "channels", "radius"), [((2, 4, 16, 24), 1, 2), ((1, 3, 9, 7), 2, 5), ((1, 2, 1, 3), 1, 2)]
)
def test_message_of_the_gated_crf(shape: tuple[int, ...], channels: int, radius: int) -> None:
    torch.manual_seed(0)
    p = torch.randn(shape, device=DEVICE).softmax(1)
    image = torch.rand(shape[0], channels, *shape[2:], device=DEVICE)
    given = fused_crf.filtered(p, image, 3.0, 0.2, radius)
    wanted = filtered(p, image, 3.0, 0.2, radius)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-6)

"""Prediction by a sliding window: the same from torch and from an exported network, and stated in its description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pclmix.errors import PclmixError
from pclmix.inference.onnx import OnnxPredictor
from pclmix.inference.predictor import About
from pclmix.inference.torch import TorchPredictor
from pclmix.labels import Labels

ABOUT = About(
    "test",
    "",
    Labels(("background", "a", "b"), None),
    ("x",),
    (40, 48),
    "window",
    aspect="keep",
    patch=(16, 16),
    window=(-100.0, 300.0),
)


class Seen(torch.nn.Module):
    """Logits that depend on where in the window a pixel is, which sees no more than a patch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-2:] == (16, 16)
        return self.conv(x.contiguous())


class Session:
    """Takes the place of onnxruntime."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net

    def run(self, _: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        (image,) = inputs.values()
        with torch.no_grad():
            return [self.net(torch.from_numpy(image)).numpy()]


@pytest.mark.parametrize("tta", ["none", "flip"])
def test_torch_and_onnx_agree(tta: Any) -> None:
    image = np.random.default_rng(0).integers(-200, 400, (2, 70, 90)).astype(np.int16)
    a = TorchPredictor(ABOUT, Seen(), torch.device("cpu"))
    b = OnnxPredictor(ABOUT, Session(Seen()), 4)
    np.testing.assert_allclose(a.logits(image), b.logits(image), atol=1e-4)
    np.testing.assert_allclose(a.probabilities(image, tta=tta), b.probabilities(image, tta=tta), atol=1e-5)
    assert (a.predict(image, tta=tta) == b.predict(image, tta=tta)).mean() > 0.999


def test_the_description_is_read_back() -> None:
    assert About.from_json(ABOUT.to_json(), ABOUT.source, "") == ABOUT


@pytest.mark.parametrize(
    ("key", "value"),
    [("patch", [64, 16]), ("patch", [16]), ("patch", [0, 16]), ("window", None), ("window", [3, 1]), ("window", [1])],
)
def test_a_description_that_does_not_fit_is_refused(key: str, value: Any) -> None:
    with pytest.raises(PclmixError, match=key):
        About.from_json({**ABOUT.to_json(), key: value}, "model.onnx", "")

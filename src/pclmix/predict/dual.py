"""Both decoders of a PCLMix checkpoint, for the uncertainty of equation 5. Labels are still those of the CNN alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pclmix.device import device_kind
from pclmix.engine.checkpoint import build_net, open_model, trained_state, with_offset
from pclmix.nets.dual import build_auxiliary
from pclmix.nets.segmenter import Segmenter
from pclmix.predict import load
from pclmix.predict.base import FLIPS, TTA, About, Array, Predictor
from pclmix.predict.model import BATCH, TorchPredictor, about_model, read_calibration, replace_offset


def load_uncertain(
    path: Path | str,
    *,
    device: str = "auto",
    batch: int | None = None,
    net: str = "net",
    offset: Mapping[str, float] | None = None,
) -> Predictor:
    """As `load`, with the transformer decoder where the checkpoint has one; else the CNN alone speaks."""
    path = Path(path)
    if path.suffix.lower() == ".onnx":
        return load(path, device=device, batch=batch, net=net, offset=offset)
    content = replace_offset(open_model(path), offset)
    both = any(name.startswith("aux.") for name in content["method"])  # a snapshot has the CNN alone
    if content["config"]["method"] != "pclmix" or net != "net" or not both:
        return load(path, device=device, batch=batch, net=net, offset=offset)
    place = torch.device(device_kind(device))
    cnn, about = build_net(content), about_model(path, content)
    params = content["config"]["params"]
    own = read_calibration(path, about.identity, warn=False).get("mean_temperature")  # `about` has warned
    return DualPredictor(
        about,
        cnn,
        build_transformer(cnn, content),
        place,
        lambda_t=float(params["lambda_t"]),
        mean_temperature=1.0 if own is None else float(own),
        batch=BATCH[place.type] if batch is None else batch,
    )


def build_transformer(net: Segmenter, content: dict[str, Any]) -> nn.Module:
    """The transformer decoder of a PCLMix checkpoint with its trained weights, in evaluation mode."""
    params, classes = content["config"]["params"], len(content["labels"]["names"])
    aux, _ = build_auxiliary(
        net, classes, params["drop_path"], params["absolute_position"], params["embedding"], params["swin_width"]
    )
    state = trained_state(content)
    own = {k.removeprefix("aux."): v for k, v in state.items() if k.startswith("aux.")}
    aux.load_state_dict(with_offset(own, content))
    return aux.eval()


class DualPredictor(TorchPredictor):
    """A predictor whose uncertainty comes from both decoders, equation 6, in float32."""

    def __init__(
        self,
        about: About,
        net: Segmenter,
        aux: nn.Module,
        device: torch.device,
        *,
        lambda_t: float,
        mean_temperature: float = 1.0,
        batch: int = 4,
    ) -> None:
        super().__init__(about, net, device, batch=batch, graph=False)
        self.aux = aux.to(device)
        self.lambda_t = lambda_t
        self.mean_temperature = mean_temperature

    def uncertain_batches(
        self, batches: Iterable[Array], size: tuple[int, int], tta: TTA = "none"
    ) -> Iterator[tuple[Array, Array]]:
        for batch in self.few(batches, size):
            labels, q = self._both(self._to_device(batch), size, tta)
            yield labels.cpu().numpy(), q.cpu().numpy()

    @torch.inference_mode()
    def _both(self, slices: Tensor, size: tuple[int, int], tta: TTA) -> tuple[Tensor, Tensor]:
        if tta == "flip":
            views = []
            for axes in FLIPS:
                logits_c, logits_t = self.both_logits(slices.flip(axes))
                views.append([p.flip(axes) for p in (self._softmax(logits_c), self._mean(logits_c, logits_t))])
            p_c, q = (self._resize(torch.stack(parts).mean(0), size) for parts in zip(*views, strict=True))
            return self._finish(p_c, size, tta, "labels"), q
        logits_c, logits_t = (self._resize(logits, size) for logits in self.both_logits(slices))
        return self._finish(logits_c, size, tta, "labels"), self._mean(logits_c, logits_t)

    def _mean(self, logits_c: Tensor, logits_t: Tensor) -> Tensor:
        """Equation 6 with calibrated probabilities."""
        p_c, p_t = ((logits / self.mean_temperature).softmax(1) for logits in (logits_c, logits_t))
        return torch.lerp(p_c, p_t, self.lambda_t)

    def both_logits(self, slices: Tensor) -> tuple[Tensor, Tensor]:
        """Equation 2 before the softmax: logits (B, K, h, w) of the CNN and of the transformer decoder."""
        net: Any = self.net
        features = net.features(slices.to(memory_format=torch.channels_last))
        return net.decode(features).float(), self.aux(features).float()

    @torch.inference_mode()
    def native_logits(self, array: Array) -> tuple[Array, Array]:
        """Logits (Z, K, H, W) of both decoders at the image's own size."""
        image = self.as_image(array)
        size = (image.shape[2], image.shape[3])
        parts = []
        for batch in self.batches(image):
            parts.append([self._resize(x, size).cpu().numpy() for x in self.both_logits(self._to_device(batch))])
        first, second = (np.concatenate(one) for one in zip(*parts, strict=True))
        return first, second

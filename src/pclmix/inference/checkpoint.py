"""Open a run folder or a checkpoint as a predictor."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pclmix.errors import PclmixError
from pclmix.inference.predictor import About, Precision
from pclmix.inference.torch import BATCH, SecondDecoder, TorchPredictor
from pclmix.io.files import read_json
from pclmix.io.volume import ending_of
from pclmix.nets.device import device_kind
from pclmix.nets.segmenter import Ensemble, Segmenter, check_side
from pclmix.training.checkpoint import Checkpoint, build_net, inference_state, load_weights, open_model

CALIBRATION = "calibration.json"
ENSEMBLE = "ensemble"
log = logging.getLogger(__name__)


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int | None = None,
    net: str = "net",
    last: bool = False,
) -> TorchPredictor:
    """The predictor of a run folder or a checkpoint; see `pclmix.inference.load`.

    Only encoder and CNN decoder are built. The transformer decoder of a PCLMix checkpoint follows when an uncertainty
    is asked for.
    """
    path = Path(path)
    place = torch.device(device_kind(device))
    if ending_of(path) and path.is_file():
        raise PclmixError(f"{path} is an image; the model comes first: pclmix predict MODEL INPUT OUT")
    checkpoint = open_model(path)
    names = network_names(path, checkpoint, net)
    nets = [build_net(checkpoint, name, last=last) for name in names]
    about = about_model(path, checkpoint, names, last=last)
    check_side(*about.seen, nets[0].multiple)
    second = None if net != "net" or last else _second_decoder(path, checkpoint, nets[0], about)
    return TorchPredictor(
        about,
        nets[0] if len(nets) == 1 else Ensemble(nets),
        place,
        bf16=precision == "bf16" or (precision == "auto" and place.type == "cuda"),
        batch=BATCH[place.type] if batch is None else batch,
        second=second,
    )


def network_names(path: Path, checkpoint: Checkpoint, net: str) -> tuple[str, ...]:
    """The networks of a checkpoint that `net` stands for: one by name, or all of them as an ensemble."""
    if net == "net":
        return (net,)
    from pclmix.methods.base import find_method  # the usual prediction imports no method

    method = checkpoint.settings.method
    known = find_method(method).inference_nets
    if len(known) == 1:
        raise PclmixError(f"--net {net}: {path} is a run of {method}, which trains one network; leave --net out")
    if net == ENSEMBLE:
        return known
    if net not in known:
        raise PclmixError(f"--net {net}: {path} is a run of {method}; choose {', '.join(known)} or {ENSEMBLE}")
    return (net,)


def about_model(path: Path, checkpoint: Checkpoint, nets: Sequence[str] = ("net",), *, last: bool = False) -> About:
    """What a checkpoint says of itself, with the temperature that `pclmix calibrate` found for its weights."""
    digest = hashlib.blake2b(digest_size=12)
    for net in nets:
        for name, tensor in sorted(inference_state(checkpoint, net, last=last).items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return About(
        str(path),
        digest.hexdigest(),
        checkpoint.labels,
        checkpoint.channels,
        checkpoint.config.data.size,
        checkpoint.config.data.intensity,
        checkpoint.run.dataset,
        checkpoint.run.cases,
        float(read_calibration(path, digest.hexdigest()).get("temperature", 1.0)),
        checkpoint.config.data.aspect,
        checkpoint.config.data.patch,
        checkpoint.config.data.window,
    )


def read_calibration(path: Path, identity: str, *, warn: bool = True) -> dict[str, Any]:
    """The calibration.json that `pclmix calibrate` wrote for these weights; empty where there is none."""
    found = (path if path.is_dir() else path.parent) / CALIBRATION
    if not found.is_file():
        return {}
    content = read_json(found)
    if not isinstance(content, dict) or content.get("identity") != identity:
        log.log(
            logging.WARNING if warn else logging.DEBUG,
            "%s is of other weights and is not used; `pclmix calibrate` makes it for a run's own",
            found,
        )
        return {}
    for key in ("temperature", "mean_temperature"):
        value = content.get(key)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value) and value > 0):
            raise PclmixError(f"{found}: {key}={value!r} must be a number above 0; run `pclmix calibrate --overwrite`")
    return content


def _second_decoder(path: Path, checkpoint: Checkpoint, net: Segmenter, about: About) -> SecondDecoder | None:
    """The transformer decoder of a PCLMix checkpoint; a snapshot holds the CNN alone."""
    if checkpoint.settings.method != "pclmix" or not any(name.startswith("aux.") for name in checkpoint.method):
        return None
    mean = read_calibration(path, about.identity, warn=False).get("mean_temperature")  # `about_model` has warned
    temperature = 1.0 if mean is None else float(mean)
    values = [_number(path, checkpoint, name) for name in ("lambda_t", "embedding", "swin_width")]
    widths = int(values[1]), int(values[2])
    return SecondDecoder(partial(_build_transformer, net, checkpoint, *widths), values[0], temperature)


def _number(path: Path, checkpoint: Checkpoint, name: str) -> float:
    """A parameter of the method, whose class is not imported to predict."""
    value = checkpoint.config.params.get(name)
    if not isinstance(value, int | float):
        raise PclmixError(f"{path}: key 'config.params.{name}': {value!r} is no number; train again or use another")
    return value


def _build_transformer(net: Segmenter, checkpoint: Checkpoint, embedding: int, swin_width: int) -> nn.Module:
    """The transformer decoder with its trained weights, in evaluation mode."""
    from pclmix.nets.dual import build_auxiliary

    aux, _ = build_auxiliary(net, checkpoint.labels.count, embedding, swin_width)
    return load_weights(aux, inference_state(checkpoint, "aux"), checkpoint)

"""Pretrained encoder weights: `encoder.weights` is none, imagenet, or a file with torchvision's key names.

ImageNet weights expect colour images normalised per channel, (x - mean) / std; ours are scaled to [0, 1]. The
normalisation is folded into the first convolution. ResNet-50 has two versions that stride in different places and name
their weights alike; the statistics in a file tell which one it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pclmix.errors import PclmixError, load_failure, without_warnings
from pclmix.nets.cnn import Block, Encoder, ResNetEncoder

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
PUBLIC = {
    "resnet18": "https://download.pytorch.org/models/resnet18-f37072fd.pth",
    "resnet34": "https://download.pytorch.org/models/resnet34-b627a593.pth",
    "resnet50": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
}
MOST_KEYS_LISTED = 20

State = dict[str, Tensor]


def load_encoder_weights(encoder: Encoder, spec: str, in_channels: int) -> None:
    """Fill `encoder`, which reads `in_channels` channels in [0, 1], with the weights that `encoder.weights` names.

    `none` leaves it as it is. `imagenet` takes torchvision's public weights from torch.hub's cache, downloading them
    once. Anything else is a .pth or .safetensors file, in any float type, with or without the classifier (`fc`).
    """
    if spec == "none":
        return
    if not isinstance(encoder, ResNetEncoder):
        raise PclmixError(f"encoder.weights={spec} needs a resnet: this network has none; set encoder.weights=none")
    if spec == "imagenet":
        state, source = download(encoder), "the public ImageNet weights"
    else:
        state, source = read_weights(Path(spec)), spec
    state = {key: value for key, value in state.items() if not key.startswith("fc.")}
    state = adapt_input(state, in_channels)
    expected = encoder.state_dict()
    # Weight files may lack the counters; a BatchNorm with fixed momentum does not use them.
    state = {key: value for key, value in expected.items() if key.endswith("num_batches_tracked")} | state
    problems = misfits(state, expected)
    if problems:
        more = f"\n  and {len(problems) - MOST_KEYS_LISTED} more" if len(problems) > MOST_KEYS_LISTED else ""
        raise PclmixError(
            f"encoder.weights: {source} does not fit {encoder.name}:\n  "
            + "\n  ".join(problems[:MOST_KEYS_LISTED])
            + f"{more}\nGive weights of {encoder.name} with torchvision's key names, or set net= to the network they "
            "were made for"
        )
    encoder.load_state_dict(state)


def download(encoder: ResNetEncoder) -> State:
    """Torchvision's ImageNet weights for `encoder`, through torch.hub's cache."""
    if encoder.name not in PUBLIC:
        raise PclmixError(
            f"encoder.weights=imagenet: there are no such weights of {encoder.name}; set net= to one of "
            f"{', '.join(PUBLIC)}, or encoder.weights= to a file or none"
        )
    url = PUBLIC[encoder.name]
    try:
        state: State = torch.hub.load_state_dict_from_url(url, map_location="cpu", check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:
        raise PclmixError(
            f"encoder.weights=imagenet: cannot download {url} ({error}). Without a network: fetch that file elsewhere "
            f"and put it into {Path(torch.hub.get_dir()) / 'checkpoints'}, or set encoder.weights=FILE; "
            "encoder.weights=none starts from random weights, which costs accuracy"
        ) from error
    return state


def read_weights(path: Path) -> State:
    """A state dict of a .pth (read without running code from it) or .safetensors file."""
    try:
        found = path.stat()
    except OSError:
        raise PclmixError(f"encoder.weights={path}: no such file; the other choices are none and imagenet") from None
    return dict(_read_weights(path, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=1)  # training reads the same file several times at its start
def _read_weights(path: Path, modified: int, size: int) -> State:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        elif path.suffix in (".pth", ".pt"):
            with without_warnings():
                state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise PclmixError(f"encoder.weights={path}: must be none, imagenet, or a .pth or .safetensors file")
    except PclmixError:
        raise
    except Exception as error:  # damaged archives raise many types of errors
        raise PclmixError(f"encoder.weights={path}: not a readable file of weights ({load_failure(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise PclmixError(f"encoder.weights={path}: holds something else than named tensors; save a plain state dict")
    return state


def fitting_net(net: str, spec: str, known: str | None = None) -> str:
    """`resnet50v1` for `resnet50` where the file `spec` holds weights of that version; any other `net` as it is.

    `spec` as in `load_encoder_weights`. `known`: the network of a resumed run, which no longer needs the file.
    """
    if net != "resnet50" or spec in ("none", "imagenet"):
        return net
    if known in ("resnet50", "resnet50v1"):
        return known
    return "resnet50v1" if strides_on_1x1(read_weights(Path(spec))) else net


def strides_on_1x1(state: State) -> bool:
    """Whether weights of a ResNet-50 were trained with the strides on the first 1x1 convolutions (`resnet50v1`).

    With the stride there, the 3x3 convolution that follows sees pixels that lie twice as far apart, so its outputs
    vary differently. Photographs go through the first strided block both ways; BatchNorm's running variances, which
    training left in the file, fit one of them. The measure is the spread over channels of the logarithm of the ratio.
    ImageNet weights of version 1 have 0.17 that way against 0.30 the other; with statistics computed again for the
    usual version they have 0.27 against 0.20. Unclear cases count as the usual version.
    """
    kernel = state.get("conv1.weight")
    channels = 3 if kernel is None or kernel.ndim != 4 else kernel.shape[1]
    with torch.device("meta"):
        encoder = ResNetEncoder("resnet50", channels)
    state = adapt_input({k: v for k, v in state.items() if not k.startswith("fc.")}, channels)
    counters = {k: torch.zeros(()) for k in encoder.state_dict() if k.endswith("num_batches_tracked")}
    if misfits(counters | state, encoder.state_dict()):
        return False  # load_encoder_weights reports the error
    encoder.load_state_dict(counters | state, assign=True)
    block = encoder.eval().layer2[0]
    assert isinstance(block, Block)
    with torch.no_grad():
        x = torch.stack([photo if channels == 3 else photo.mean(0).expand(channels, -1, -1) for photo in photographs()])
        x = encoder.layer1(encoder.maxpool(F.relu(encoder.bn1(encoder.conv1(x)))))
        x = F.relu(block.norm(1)(F.conv2d(x, state["layer2.0.conv1.weight"])))
        kernel, trained = state["layer2.0.conv2.weight"], state["layer2.0.bn2.running_var"]
        outputs = F.conv2d(x[..., ::2, ::2], kernel, padding=1), F.conv2d(x, kernel, stride=2, padding=1)
        first, usual = (float((y.var((0, 2, 3)).log() - trained.log()).std()) for y in outputs)
    return first < 0.8 * usual


def photographs(side: int = 224) -> Iterator[Tensor]:
    """A few photographs of scikit-image, (3, side, side) in [0, 1]."""
    from skimage import data

    for image in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
        colours = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float() / 255
        shorter = min(colours.shape[2:])
        yield F.interpolate(colours[:, :, :shorter, :shorter], size=(side, side), mode="area")[0]


def adapt_input(state: State, in_channels: int) -> State:
    """Make `conv1` read `in_channels` channels in [0, 1]; everything in float32.

    A colour kernel w (O, 3, h, w) has its normalisation folded in: w_c / std_c, and the constant that the means add to
    every output, sum w_c mean_c / std_c, moves bn1.running_mean. At the border the convolution then pads with black
    where the original padded with the mean colour. One channel gets the sum over the colours; any other number than
    three gets that sum divided by the number, so that equal channels act as one. A kernel of one channel is assumed to
    read [0, 1] already. Any other shape is refused by the check that follows.
    """
    state = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
    weight, mean = state.get("conv1.weight"), state.get("bn1.running_mean")
    if weight is None or mean is None or weight.ndim != 4 or mean.shape != weight.shape[:1]:
        return state
    if weight.shape[1] == len(MEAN):
        weight = weight / torch.tensor(STD).view(1, 3, 1, 1)
        offset = (weight * torch.tensor(MEAN).view(1, 3, 1, 1)).sum(dim=(1, 2, 3))
        state["bn1.running_mean"] = mean + offset
        if in_channels != len(MEAN):
            weight = weight.sum(dim=1, keepdim=True)
    if weight.shape[1] == 1:
        weight = weight.expand(-1, in_channels, -1, -1) / in_channels
    state["conv1.weight"] = weight
    return state


def misfits(state: State, expected: State) -> list[str]:
    """The keys of `state` that do not fit `expected`, a line each: missing, unknown, or of another shape."""
    lines = [f"{key}: missing" for key in expected if key not in state]
    lines += [f"{key}: unknown" for key in state if key not in expected]
    lines += [
        f"{key}: {tuple(state[key].shape)} where {tuple(expected[key].shape)} is needed"
        for key in expected
        if key in state and state[key].shape != expected[key].shape
    ]
    return lines

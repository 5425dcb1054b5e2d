"""Pretrained encoder weights: `encoder.weights` is none, imagenet, or a file with torchvision's key names.

ImageNet weights expect colour images normalised per channel, (x - mean) / std; ours are scaled to [0, 1]. The
normalisation is folded into the first convolution, so that no later step has to know of it.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from pclmix.errors import PclmixError
from pclmix.nets.encoder import Encoder, ResNetEncoder

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
    """Fill `encoder`, which reads `in_channels` channels in [0, 1], as `encoder.weights` says.

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
    # Files that hold weights alone have no counters; a BatchNorm with a fixed momentum never reads its own.
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
    if encoder.stride_in_1x1:
        raise PclmixError(
            "encoder.weights=imagenet has the stride on the 3x3 convolution: set encoder.stride_in_1x1=false"
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
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        elif path.suffix in (".pth", ".pt"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise PclmixError(f"encoder.weights={path}: must be none, imagenet, or a .pth or .safetensors file")
    except FileNotFoundError:
        raise PclmixError(f"encoder.weights={path}: no such file; the other choices are none and imagenet") from None
    except PclmixError:
        raise
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, _safetensors_error()) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PclmixError(f"encoder.weights={path}: cannot be read as a file of weights ({detail})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise PclmixError(f"encoder.weights={path}: holds something else than named tensors; save a plain state dict")
    return state


def _safetensors_error() -> type[Exception]:
    from safetensors import SafetensorError

    error: type[Exception] = SafetensorError
    return error


def adapt_input(state: State, in_channels: int) -> State:
    """Make `conv1` read `in_channels` channels in [0, 1]; everything in float32.

    A colour kernel w (O, 3, h, w) has its normalisation folded in: w_c / std_c, and the constant that the means add to
    every output, sum w_c mean_c / std_c, moves bn1.running_mean. At the border the convolution then pads with black
    where the original padded with the mean colour. One channel gets the sum over the colours; any other number than
    three gets that sum divided by the number, so that equal channels look like one. A kernel of one channel is taken
    to read [0, 1] already. Anything else is left for the check of shapes to refuse.
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
    """What keeps `state` from filling `expected`, a line for each key: missing, unknown, or of another shape."""
    lines = [f"{key}: missing" for key in expected if key not in state]
    lines += [f"{key}: unknown" for key in state if key not in expected]
    lines += [
        f"{key}: {tuple(state[key].shape)} where {tuple(expected[key].shape)} is needed"
        for key in expected
        if key in state and state[key].shape != expected[key].shape
    ]
    return lines

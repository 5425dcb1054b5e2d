"""What a run is made of: typed, frozen, validated. A recipe (YAML) plus key=value overrides gives one Config.

Every field carries the sentence that explains it; `pclmix train` writes the resolved Config into the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, ValidationInfo, field_validator

from pclmix.errors import PclmixError, nearest

Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Encoder(Section):
    weights: str = Field("none", description="none, imagenet (public weights), or a .pth or .safetensors file")
    stride_in_1x1: bool = Field(False, description="the stride of a bottleneck sits on its first 1x1 convolution")


class Data(Section):
    size: tuple[Positive, Positive] = Field((256, 256), description="height and width every slice is resized to")
    intensity: Literal["slice", "volume"] = Field("slice", description="scale to [0, 1] per slice or per volume")
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of training patients held out")
    outside: Share = Field(
        0.0,
        description="share of the pixels outside the convex hull of a slice's strokes taken for background in a step; "
        "only for background strokes that go round the object, with nothing but background outside the hull",
    )
    inside: dict[str, Share] = Field(
        default_factory=dict,
        description="class: share of the pixels in the convex hull of the class's strokes in a slice taken for it in a "
        "step; only for structures that are one convex piece in every slice",
    )


class Augment(Section):
    quarter_turns: Share = Field(0.5, description="probability of a random quarter turn and flip")
    rotate: Share = Field(0.5, description="probability of a small rotation where there was no quarter turn")
    degrees: NonNegative = Field(20.0, description="largest small rotation")
    scale: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="zoom drawn from 1 - scale to 1 + scale")
    shift: NonNegative = Field(0.0, description="largest shift as a share of the side")
    pinch: Annotated[float, Field(ge=0, lt=1.3)] = Field(
        0.0, description="log-range by which things shrink or grow around a stroke of a structure"
    )
    gamma: NonNegative = Field(0.0, description="log-range of the gamma exponent")
    contrast: NonNegative = Field(0.0, description="largest relative change of contrast and shift of brightness")
    noise: NonNegative = Field(0.0, description="largest standard deviation of added noise")


class Optim(Section):
    name: Literal["sgd", "adamw"] = Field("sgd", description="the optimiser")
    lr: Annotated[float, Field(gt=0)] = Field(0.03, description="learning rate at the start")
    lr_end: NonNegative = Field(0.001, description="learning rate at the end")
    power: NonNegative = Field(0.9, description="lr = lr_end + (lr - lr_end) (1 - t/T)^power")
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of training with a linear rise")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of SGD")
    nesterov: bool = Field(False, description="Nesterov momentum; needs optim.momentum above 0")
    weight_decay: NonNegative = Field(5e-4, description="weight decay")
    clip: NonNegative = Field(0.0, description="largest norm of the gradient; 0 turns clipping off")

    @field_validator("nesterov")
    @classmethod
    def _require_momentum(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("momentum") == 0:
            raise ValueError("there is no momentum; set optim.momentum above 0, such as 0.9")
        return value


class Engine(Section):
    batch: Positive = Field(12, description="images a step, over all devices together")
    iterations: Positive = Field(60000, description="number of steps, T")
    seconds: Annotated[float, Field(gt=0)] | None = Field(None, description="train for this long instead")
    ema: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="decay of the weight average; 0 turns it off")
    precision: Literal["32", "bf16"] = Field("32", description="bf16 runs the networks under autocast")
    channels_last: bool = Field(True, description="memory layout of images and convolutions")
    graph: bool = Field(True, description="one CUDA graph for the whole step, on CUDA with one device")
    log_every: Positive = Field(20, description="steps between lines of metrics.jsonl")
    save_every: Positive = Field(500, description="steps between checkpoints")
    keep_every: Annotated[int, Field(ge=0)] = Field(0, description="steps between weights kept in snapshots; 0: none")

    @field_validator("precision", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value


class Config(Section):
    """Everything that decides a run, besides the dataset itself."""

    recipe: str = Field("custom", description="the recipe this came from")
    method: str = Field("pclmix", description="a name of `pclmix methods`")
    net: str = Field("resnet50", description="resnet50, resnet34, resnet18, resnet10 (thin) or unet")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        0, description="of weights, data order, augmentation and mixing"
    )
    encoder: Encoder = Encoder()
    data: Data = Data()
    augment: Augment = Augment()
    optim: Optim = Optim()
    engine: Engine = Engine()
    params: dict[str, Any] = Field(default_factory=dict, description="the method's own parameters")
    offset: dict[str, FiniteFloat] = Field(
        default_factory=dict,
        description="class: what is added to its score when the trained network predicts, so that it gets more (or, "
        "negative, less) of the borders that strokes leave open",
    )


S = TypeVar("S", bound=BaseModel)


def build(model: type[S], content: Mapping[str, Any], where: str) -> S:
    """Validate `content` as `model`; the error names the key, the value and what is allowed."""
    try:
        return model.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _fields_at(model, first["loc"][:-1])
            hint = nearest(str(first["loc"][-1]), known)
            raise PclmixError(f"{where}: unknown key '{key}'.{hint} Known: {', '.join(known)}") from None
        raise PclmixError(f"{where}: {key}={first['input']!r}: {first['msg'].lower()}") from None


def load_config(recipe: str, method: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The recipe by name or file, then its deviations for the method, then key=value overrides."""
    path = recipe_path(recipe)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PclmixError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise PclmixError(f"{path}: keys and values are needed")
    deviations = content.pop("deviations", None) or {}
    content.setdefault("recipe", path.stem)
    if method is not None:
        content["method"] = method
    chosen = content.get("method", "pclmix")
    if not isinstance(deviations, dict) or not all(isinstance(d, list | None) for d in deviations.values()):
        raise PclmixError(f"{path}: 'deviations' must map method names to lists of key=value")
    for override in _flat(deviations.get(chosen) or []):
        _set(content, override, f"{path}: deviations of {chosen}")
    config = build(Config, content, str(path))
    return override_config(content, None, overrides) if overrides else config


def override_config(content: Mapping[str, Any], method: str | None, overrides: Sequence[str]) -> Config:
    """An earlier run's configuration with a few keys given anew."""
    changed = deepcopy(dict(content))
    if method is not None:
        changed["method"] = method
    for override in overrides:
        _set(changed, override, "command line")
    return build(Config, changed, "command line")


def recipe_path(recipe: str) -> Path:
    """A recipe that comes with the package, or a YAML file of the user's."""
    if recipe.endswith((".yaml", ".yml")):
        path = Path(recipe)
        if not path.is_file():
            raise PclmixError(f"recipe file {path} does not exist")
        return path
    folder = _recipe_folder()
    path = folder / f"{recipe}.yaml"
    if not path.is_file():
        known = recipe_names()
        raise PclmixError(
            f"unknown recipe '{recipe}'.{nearest(recipe, known)} Known: {', '.join(known)}, or a .yaml file"
        )
    return path


def recipe_names() -> list[str]:
    return sorted(p.stem for p in _recipe_folder().glob("*.yaml"))


def _recipe_folder() -> Path:
    """Inside the installed package, or at the top of the repository in an editable install."""
    installed = Path(__file__).parent / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def _set(content: dict[str, Any], override: str, where: str) -> None:
    """Put `a.b=value` into nested `content`, the value read as YAML."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise PclmixError(f"{where}: '{override}' is not of the form key=value, such as optim.lr=0.01")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PclmixError(f"{where}: the value of '{override}' cannot be read: {error}") from error
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e-4 as text
    *parents, last = key.split(".")
    node = content
    for part in parents:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise PclmixError(f"{where}: '{part}' in '{key}' is not a section")
        node = child
    node[last] = value


def _flat(items: Sequence[Any]) -> Iterator[str]:
    """The strings of nested lists in order: YAML's way to take over another method's list and add to it."""
    for item in items:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield str(item)


def _fields_at(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def describe(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key with its default and its sentence, for the documentation."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from describe(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.get_default(call_default_factory=True), field.description or ""

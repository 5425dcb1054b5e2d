"""The configuration of a run: typed, frozen, validated. A recipe (YAML) plus key=value overrides gives one Config.

Every field has a description; `pclmix train` writes the resolved Config into the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from pclmix.errors import PclmixError, nearest, read_yaml

Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Side = Annotated[int, Field(ge=1, le=16384)]
LARGEST = 1e12  #: of any number in a configuration


class Section(BaseModel):
    """A part of the configuration: frozen. Unknown keys, true for a number, infinity and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _require_plain_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that pydantic would convert (true becomes 1), infinity and NaN."""
        if cls.model_fields[str(info.field_name)].annotation is bool:
            return value
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, bool):
                raise ValueError("true and false are not allowed here")
            if isinstance(number, int | float) and LARGEST < abs(number) < math.inf:
                raise ValueError(f"the largest number allowed is {LARGEST:.0e}")
        return value


class Encoder(Section):
    weights: str = Field("none", description="none, imagenet (public weights), or a .pth or .safetensors file")


class Data(Section):
    size: tuple[Side, Side] = Field((256, 256), description="height and width every slice is resized to")
    aspect: Literal["keep", "stretch"] = Field(
        "keep", description="keep scales a slice until it fits into the size and pads the rest; stretch fills the size"
    )
    patch: tuple[Side, Side] | None = Field(
        None,
        description="height and width of patches of a resized slice: random in training, overlapping in prediction; "
        "null: whole slices",
    )
    intensity: Literal["slice", "volume", "window"] = Field(
        "slice", description="scale to [0, 1] per slice, per volume, or from the fixed data.window"
    )
    window: tuple[float, float] | None = Field(
        None, description="lowest and highest value for data.intensity=window, in the unit of the images"
    )
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of training patients held out")
    ring_share: Share = Field(
        0.0,
        description="share of the pixels outside the convex hull of a slice's strokes that a step labels with the "
        "class of habit ring, if there is one",
    )

    @model_validator(mode="after")
    def _require_agreement(self) -> Data:
        if (self.intensity == "window") != (self.window is not None):
            raise ValueError("data.window and data.intensity=window need each other")
        if self.window is not None and self.window[0] >= self.window[1]:
            raise ValueError(f"data.window={list(self.window)}: the first value must be below the second")
        if self.patch is not None:
            if self.patch[0] > self.size[0] or self.patch[1] > self.size[1]:
                raise ValueError(f"data.patch={list(self.patch)} is larger than data.size={list(self.size)}")
            if self.ring_share > 0:
                raise ValueError("data.ring_share looks at whole slices and must be 0 with data.patch")
        return self

    @property
    def seen(self) -> tuple[int, int]:
        """Height and width of the network's input."""
        return self.patch or self.size


class Augment(Section):
    quarter_turns: Share = Field(0.5, description="probability of a random quarter turn and flip")
    rotate: Share = Field(0.5, description="probability of a small rotation where there was no quarter turn")
    degrees: NonNegative = Field(20.0, description="largest small rotation")
    scale: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="zoom drawn from 1 - scale to 1 + scale")
    shift: NonNegative = Field(0.0, description="largest shift as a share of the side")
    pinch: Annotated[float, Field(ge=0, lt=1.3)] = Field(
        0.0, description="log-range of local scaling around a foreground stroke"
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
    weight_decay: NonNegative = Field(5e-4, description="weight decay")
    clip: NonNegative = Field(0.0, description="largest norm of the gradient; 0 turns clipping off")


class Engine(Section):
    batch: Positive = Field(12, description="images per step, over all devices")
    iterations: Positive = Field(60000, description="number of steps, T")
    seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, description="seconds of training, instead of iterations"
    )
    ema: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="decay of the weight average; 0 turns it off")
    precision: Literal["32", "bf16"] = Field("32", description="bf16 runs the networks under autocast")
    graph: bool = Field(True, description="one CUDA graph for the whole step, on CUDA")
    log_every: Positive = Field(20, description="steps between lines of metrics.jsonl")
    save_every: Positive = Field(500, description="steps between checkpoints")
    keep_every: Annotated[int, Field(ge=0)] = Field(0, description="steps between weights kept in snapshots; 0: none")

    @field_validator("precision", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value


class Rounds(Section):
    count: Annotated[int, Field(ge=1, le=9)] = Field(
        1,
        description="number of successive trainings. Each further one trains a fresh network on dense labels: "
        "predictions of the previous network, corrected by strokes and stroke habits",
    )
    iterations: Positive | None = Field(None, description="steps of each further round; required if there is one")
    share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="share of engine.seconds, if given, for each further round"
    )
    brightness: NonNegative = Field(
        0.0,
        description="weight of intensity in the labels of further rounds: an undecided pixel takes the class whose "
        "pixels in the slice have such an intensity",
    )
    midline: bool = Field(
        False,
        description="whether, in the labels of further rounds, undecided pixels end a wall (habit midline) as far "
        "outside its stroke as inside",
    )
    augment: dict[str, Any] = Field(default_factory=dict, description="settings of augment that further rounds change")

    @field_validator("iterations")
    @classmethod
    def _require_iterations(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None and info.data.get("count", 1) > 1:
            raise ValueError(f"rounds.count={info.data['count']} needs the number of steps of each further round")
        return value

    @field_validator("share")
    @classmethod
    def _require_time_for_the_first(cls, value: float, info: ValidationInfo) -> float:
        further = info.data.get("count", 1) - 1
        if further * value >= 1:
            raise ValueError(f"{further} further rounds leave no time for the first")
        return value


class Config(Section):
    """All settings of a run besides the dataset."""

    recipe: str = Field("custom", description="name of the recipe")
    method: str = Field("pclmix", description="a name of `pclmix methods`")
    net: str = Field(
        "resnet50",
        description="resnet50, resnet34, resnet18, resnet10 (thin), unet, or resnet50v1 (strides on 1x1 convolutions, "
        "chosen for resnet50 where encoder.weights is a file of that version)",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        0, description="random seed of weights, data order, augmentation and mixing"
    )
    encoder: Encoder = Encoder()
    data: Data = Data()
    augment: Augment = Augment()
    optim: Optim = Optim()
    engine: Engine = Engine()
    rounds: Rounds = Rounds()
    habits: dict[str, str | list[str]] = Field(
        default_factory=dict,
        description="stroke habits by class (ring, convex, midline, pieces, none); these replace those of dataset.json",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="the method's own parameters")

    def of_round(self, number: int) -> Config:
        """The settings of round `number`, counted from 1; further rounds have dense labels."""
        if number == 1:
            return self
        augment = build(Augment, {**self.augment.model_dump(), **self.rounds.augment}, "rounds.augment")
        engine = self.engine.model_copy(update={"iterations": self.rounds.iterations})
        data = self.data.model_copy(update={"ring_share": 0.0})
        update = {"augment": augment, "engine": engine, "data": data, "method": "full", "params": {}}
        return self.model_copy(update=update)


S = TypeVar("S", bound=BaseModel)


def build(model: type[S], content: Mapping[str, Any], where: str) -> S:
    """Validate `content` as `model`; the error names the key, the value and the allowed values."""
    try:
        return model.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _fields_at(model, first["loc"][:-1])
            hint = _section_of(str(first["loc"][-1])) or nearest(str(first["loc"][-1]), known)
            raise PclmixError(f"{where}: unknown key '{key}'.{hint} Known: {', '.join(known) or 'none'}") from None
        message = first["msg"].removeprefix("Value error, ")
        raise PclmixError(f"{where}: {key}={first['input']!r}: {message[:1].lower()}{message[1:]}") from None


def load_config(recipe: str, method: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The recipe by name or file, then its deviations for the method, then key=value overrides."""
    path = recipe_path(recipe)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PclmixError(f"{path} is not valid YAML: {error}") from error
    return config_from_text(text, path.stem, method, overrides, str(path))


def config_from_text(
    text: str, name: str, method: str | None = None, overrides: Sequence[str] = (), where: str | None = None
) -> Config:
    """The configuration that the YAML of a recipe called `name` describes; `where` names the file for messages."""
    path = where or name
    content = deepcopy(_parsed(text, path))
    content = {} if content is None else content  # an empty file is a recipe of defaults
    if not isinstance(content, dict):
        raise PclmixError(f"{path}: keys and values are needed")
    deviations = content.pop("deviations", None) or {}
    content.setdefault("recipe", name)
    named = [value for key, _, value in (override.partition("=") for override in overrides) if key == "method"]
    if named or method is not None:
        content["method"] = named[-1] if named else method
    chosen = content.get("method", "pclmix")
    if not isinstance(deviations, dict) or not all(isinstance(d, list | None) for d in deviations.values()):
        raise PclmixError(f"{path}: 'deviations' must map method names to lists of key=value")
    for override in _flat((deviations.get(chosen) if isinstance(chosen, str) else None) or []):
        _set(content, override, f"{path}: deviations of {chosen}")
    config = _build_all_rounds(content, path)
    return override_config(content, None, overrides) if overrides else config


@lru_cache(maxsize=16)
def _parsed(text: str, where: str) -> Any:
    """The content of a recipe. Cached: a study reads the recipe of its runs several times for each of them."""
    return read_yaml(text, where)


def override_config(content: Mapping[str, Any], method: str | None, overrides: Sequence[str]) -> Config:
    """An earlier run's configuration with some keys changed."""
    changed = deepcopy(dict(content))
    if method is not None:
        changed["method"] = method
    for override in overrides:
        _set(changed, override, "command line")
    return _build_all_rounds(changed, "command line")


def _build_all_rounds(content: Mapping[str, Any], where: str) -> Config:
    config = build(Config, content, where)
    config.of_round(config.rounds.count)  # refuses settings that further rounds cannot train with
    return config


def planned_steps(content: Mapping[str, Any]) -> int:
    """Steps of all rounds together, from the content of a run's config.yaml."""
    rounds = content.get("rounds") or {}
    further = (int(rounds.get("count", 1)) - 1) * int(rounds.get("iterations") or 0)
    return int(content["engine"]["iterations"]) + further


def recipe_path(recipe: str) -> Path:
    """A recipe of the package, or a YAML file."""
    if not isinstance(recipe, str):
        raise PclmixError(f"recipe={recipe!r}: the name of a recipe or of a .yaml file is needed")
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
    value = read_yaml(text, f"{where}: the value of '{override}'", "cannot be read")
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
    """The strings of nested lists in order: YAML aliases extend another method's list this way."""
    for item in items:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield str(item)


def _section_of(key: str) -> str:
    """A hint for a key that lacks its section, such as ` Did you mean 'optim.lr'?`."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section) and key in section.model_fields:
            return f" Did you mean '{name}.{key}'?"
    return ""


def _fields_at(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)

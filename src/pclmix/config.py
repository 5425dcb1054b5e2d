"""What a run is made of: typed, frozen, validated. A recipe (YAML) plus key=value overrides gives one Config.

Every field carries the sentence that explains it; `pclmix train` writes the resolved Config into the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from pclmix.errors import PclmixError, nearest

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
        """Refuse what pydantic would convert (true becomes 1) and numbers that no computation can hold."""
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
        description="height and width of the part of a resized slice that the network sees at once: a random one in "
        "training, overlapping ones in prediction; null: the whole slice",
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
        description="share of the pixels outside the convex hull of a slice's strokes that count as strokes in a step: "
        "of the class whose habit is ring, if the dataset states one",
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
        """Height and width of what the network sees at once."""
        return self.patch or self.size


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
    weight_decay: NonNegative = Field(5e-4, description="weight decay")
    clip: NonNegative = Field(0.0, description="largest norm of the gradient; 0 turns clipping off")


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


class Rounds(Section):
    count: Annotated[int, Field(ge=1, le=9)] = Field(
        1,
        description="trainings in a row. Each after the first trains a fresh network on all pixels, on what the one "
        "before predicts for the training slices, straightened by their strokes and the dataset's habits",
    )
    iterations: Positive | None = Field(None, description="steps of each further round; needed where there is one")
    share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="of engine.seconds, where that is given, for each further round"
    )
    augment: dict[str, Any] = Field(
        default_factory=dict, description="settings of augment in further rounds, in place of the first round's"
    )
    optim: dict[str, Any] = Field(
        default_factory=dict, description="settings of optim in further rounds, in place of the first round's"
    )

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
    """Everything that decides a run, besides the dataset itself."""

    recipe: str = Field("custom", description="the recipe this came from")
    method: str = Field("pclmix", description="a name of `pclmix methods`")
    net: str = Field(
        "resnet50",
        description="resnet50, resnet34, resnet18, resnet10 (thin), unet, or resnet50v1 (strides on 1x1 convolutions, "
        "chosen for resnet50 where encoder.weights is a file of that version)",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        0, description="of weights, data order, augmentation and mixing"
    )
    encoder: Encoder = Encoder()
    data: Data = Data()
    augment: Augment = Augment()
    optim: Optim = Optim()
    engine: Engine = Engine()
    rounds: Rounds = Rounds()
    habits: dict[str, str | list[str]] = Field(
        default_factory=dict,
        description="class: how its strokes were drawn (ring, convex, midline, pieces or none), in place of what "
        "dataset.json says of it",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="the method's own parameters")

    def of_round(self, number: int) -> Config:
        """The settings that round `number`, from 1 on, trains with: further ones have labels of every pixel."""
        if number == 1:
            return self
        changed = {
            name: build(type(section), {**section.model_dump(), **changes}, f"rounds.{name}")
            for name, section, changes in (
                ("augment", self.augment, self.rounds.augment),
                ("optim", self.optim, self.rounds.optim),
            )
        }
        engine = self.engine.model_copy(update={"iterations": self.rounds.iterations})
        data = self.data.model_copy(update={"ring_share": 0.0})
        return self.model_copy(update={**changed, "engine": engine, "data": data, "method": "full", "params": {}})


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
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PclmixError(f"{path} is not valid YAML: {error}") from error
    content = {} if content is None else content  # an empty file is a recipe of defaults
    if not isinstance(content, dict):
        raise PclmixError(f"{path}: keys and values are needed")
    deviations = content.pop("deviations", None) or {}
    content.setdefault("recipe", name)
    if method is not None:
        content["method"] = method
    chosen = content.get("method", "pclmix")
    if not isinstance(deviations, dict) or not all(isinstance(d, list | None) for d in deviations.values()):
        raise PclmixError(f"{path}: 'deviations' must map method names to lists of key=value")
    for override in _flat(deviations.get(chosen) or []):
        _set(content, override, f"{path}: deviations of {chosen}")
    config = _build_all_rounds(content, path)
    return override_config(content, None, overrides) if overrides else config


def override_config(content: Mapping[str, Any], method: str | None, overrides: Sequence[str]) -> Config:
    """An earlier run's configuration with a few keys given anew."""
    changed = deepcopy(dict(content))
    if method is not None:
        changed["method"] = method
    for override in overrides:
        _set(changed, override, "command line")
    return _build_all_rounds(changed, "command line")


def _build_all_rounds(content: Mapping[str, Any], where: str) -> Config:
    config = build(Config, content, where)
    config.of_round(config.rounds.count)  # refuses what no further round can train with
    return config


def planned_steps(content: Mapping[str, Any]) -> int:
    """Steps of all rounds together, from the content of a run's config.yaml."""
    rounds = content.get("rounds") or {}
    further = (int(rounds.get("count", 1)) - 1) * int(rounds.get("iterations") or 0)
    return int(content["engine"]["iterations"]) + further


def recipe_path(recipe: str) -> Path:
    """A recipe that comes with the package, or a YAML file of the user's."""
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

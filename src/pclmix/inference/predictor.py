"""Predictor: images to label maps at native size. Subclasses run the network.

Nothing here needs torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pclmix.data.preprocess import Aspect, Intensity, Preprocessing, intensity_range
from pclmix.errors import PclmixError, require_one_of
from pclmix.inference.inputs import array_to_image, channel_files, read_images
from pclmix.inference.uncertainty import Examined, examine
from pclmix.io.files import write_json
from pclmix.io.volume import Geometry, require_ending, stem_of, write_labels
from pclmix.labels import Labels

Array = npt.NDArray[Any]
Image = Array | Path | str
TTA = Literal["none", "flip"]
Precision = Literal["auto", "32", "bf16"]
Wanted = Literal["labels", "probabilities", "logits"]
SCORES_AT_ONCE = 2**26  #: numbers of (B, K, H, W) held at native size to find labels
_LARGEST, _SIDE = 1e12, 16384  # of numbers that describe a model, as in a configuration
EXAMINED_AT_ONCE = 2**24  #: the same when probabilities are examined, which needs several such arrays


@dataclass(frozen=True)
class About:
    """Description of a model. It comes from a file, so it is validated."""

    source: str  #: the file or folder it was loaded from
    identity: str  #: a hash of the weights
    labels: Labels
    channels: tuple[str, ...]
    size: tuple[int, int]  #: H and W that slices are resized to
    intensity: Intensity
    dataset: str = ""  #: name of the dataset it was trained on
    trained_on: tuple[str, ...] = field(default=(), repr=False)  #: the training cases
    temperature: float = 1.0  #: divides logits before the softmax; fitted by `pclmix calibrate`
    aspect: Aspect = "stretch"  #: whether slices are padded or stretched to `size`
    patch: tuple[int, int] | None = None  #: H and W of the sliding window; None for whole slices
    window: tuple[float, float] | None = None  #: intensities from 0 to 1, in the unit of the image

    def __post_init__(self) -> None:
        names = (*self.labels.names, *self.channels, *self.trained_on, self.dataset, self.identity)
        problem = ""
        if not self.channels or not all(isinstance(name, str) for name in names):
            problem = "its classes, channels, dataset and cases must be names"
        elif len(self.size) != 2 or not all(type(n) is int and 0 < n <= _SIDE for n in self.size):
            problem = f"size={list(self.size)} must be two whole numbers above 0 and at most {_SIDE}"
        elif self.patch is not None and not _fits(self.patch, self.size):
            problem = f"patch={self.patch!r} must be two whole numbers above 0 and at most those of size"
        elif self.intensity not in get_args(Intensity):
            problem = f"intensity={self.intensity!r} must be slice, volume or window"
        elif (self.intensity == "window") != (self.window is not None):
            problem = f"window={self.window!r} and intensity={self.intensity!r} do not belong together"
        elif self.window is not None and not _is_range(self.window):
            problem = f"window={self.window!r} must be two numbers, the smaller one first"
        elif self.aspect not in ("keep", "stretch"):
            problem = f"aspect={self.aspect!r} must be keep or stretch"
        elif not is_temperature(self.temperature):
            problem = f"temperature={self.temperature!r} must be a number above 0"
        if problem:
            raise PclmixError(f"{self.source}: {problem}; the file was changed or damaged: train or export again")

    def to_json(self) -> dict[str, Any]:
        """The description that an exported model carries."""
        return {
            "labels": list(self.labels.names),
            "ignore": self.labels.ignore,
            "channels": list(self.channels),
            "size": list(self.size),
            "patch": None if self.patch is None else list(self.patch),
            "intensity": self.intensity,
            "window": None if self.window is None else list(self.window),
            "aspect": self.aspect,
            "temperature": self.temperature,
            "dataset": self.dataset,
            "trained_on": list(self.trained_on),
        }

    @classmethod
    def from_json(cls, content: Any, source: str, identity: str) -> About:
        """Read what `to_json` wrote into the file or folder `source`; the error names the key."""

        def typed(key: str, *kinds: type) -> Any:
            value = content.get(key) if isinstance(content, dict) else None
            if type(value) not in kinds:
                raise PclmixError(f"{source}: {key}={value!r} is not valid for an exported model; export it again")
            return value

        def pair(key: str) -> Any:
            value = typed(key, list, type(None))
            return None if value is None else tuple(value)

        if len(typed("labels", list)) < 2:
            raise PclmixError(f"{source}: labels={content['labels']!r} has no class; export it again")
        return cls(
            source,
            identity,
            Labels(tuple(content["labels"]), typed("ignore", int, type(None))),
            tuple(typed("channels", list)),
            tuple(typed("size", list)),
            typed("intensity", str),
            typed("dataset", str),
            tuple(typed("trained_on", list)),
            typed("temperature", float, int),
            typed("aspect", str),
            pair("patch"),
            pair("window"),
        )

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing(self.size, self.intensity, self.aspect, window=self.window)

    @property
    def seen(self) -> tuple[int, int]:
        """H and W of the network's input."""
        return self.patch or self.size


class Predictor(ABC):
    """A loaded model. `batch` is the number of slices in one forward pass.

    Images are arrays (H, W), (H, W, C), (Z, H, W) or (C, Z, H, W) in any intensity unit, or the path of a file or
    DICOM series. Results have the image's spatial shape: (H, W) in, (H, W) out. `spacing`, (z, y, x) in mm, describes
    the array; slices are predicted pixel by pixel and do not depend on it. `tta="flip"` averages probabilities over
    flipped copies.
    """

    def __init__(self, about: About, batch: int) -> None:
        if batch < 1:
            raise PclmixError(f"--batch {batch}: at least one slice must go through the network at once")
        self.about = about
        self.batch = batch

    def __repr__(self) -> str:
        about = self.about
        return (
            f"<{type(self).__name__} {about.source}: {', '.join(about.labels.foreground)} "
            f"in {' + '.join(about.channels)}, {about.size[0]} x {about.size[1]}>"
        )

    @abstractmethod
    def _run(self, batches: Iterable[Array], size: tuple[int, int], tta: TTA, wanted: Wanted) -> Iterator[Array]:
        """For each batch of prepared slices (B, C, h, w): labels (B, H, W), or scores (B, K, H, W) in float32.

        Scores are resized to `size`, then the largest is the label. `flip` averages the softmax over FLIPS. A softmax
        is that of logits / temperature.
        """

    def predict(
        self,
        image: Image,
        spacing: Sequence[float] | None = None,
        *,
        tta: TTA = "none",
        largest_component: bool = False,
    ) -> Array:
        """Labels of an image, in its spatial shape. Besides both, a few batches of slices are in memory."""
        require_one_of("tta", tta, get_args(TTA))
        array, flat = self.open(image, spacing)
        labels = self.label(self.batches(array), _size(array), tta)
        labels = self.largest(labels) if largest_component else labels
        return labels[0] if flat else labels

    def probabilities(self, image: Image, spacing: Sequence[float] | None = None, *, tta: TTA = "none") -> Array:
        """Calibrated softmax, (Z, K, H, W) or (K, H, W), float32. Labels are its argmax."""
        return self._scores(image, spacing, tta, "probabilities")

    def logits(self, image: Image, spacing: Sequence[float] | None = None) -> Array:
        """Logits (Z, K, H, W) or (K, H, W), resized to the image's own size, float32."""
        return self._scores(image, spacing, "none", "logits")

    def examine(self, image: Image, spacing: Sequence[float] | None = None, *, tta: TTA = "none") -> Examined:
        """Labels, entropy (equation 5) and quality estimates of an image, as `pclmix predict --uncertainty`."""
        require_one_of("tta", tta, get_args(TTA))
        array, flat = self.open(image, spacing)
        found = examine(self.uncertain_batches(self.batches(array), _size(array), tta))
        if flat:
            found = replace(found, labels=found.labels[0], entropy=found.entropy[0], second=found.second[0])
        return found

    def predict_file(
        self, image: Path | str, out: Path | str, *, tta: TTA = "none", largest_component: bool = False
    ) -> Array:
        """Predict one file (CASE_0000 stands for all its channels), write labels over its grid, return (Z, H, W)."""
        require_ending(Path(out))  # fail before predicting
        array, geometry = self.read(channel_files(Path(image), len(self.about.channels))[1])
        labels = self.predict(array, geometry.spacing, tta=tta, largest_component=largest_component)
        self.write(Path(out), labels, geometry)
        return labels

    def read(self, paths: Sequence[Path]) -> tuple[Array, Geometry]:
        """The channels of one image, checked against the model."""
        volume = read_images(paths, len(self.about.channels))
        return volume.array, volume.geometry

    def write(self, path: Path, labels: Array, like: Geometry) -> None:
        """Write a label map; a picture has no header, so its spacing goes into a JSON file, as nnU-Net wants it."""
        write_labels(path, labels, like, self.about.labels.names, self.about.labels.colours())
        if like.header is None and like.spacing != (1.0, 1.0, 1.0):
            write_json(path.with_name(f"{stem_of(path)}.json"), {"spacing": list(like.spacing)})

    def open(self, image: Image, spacing: Sequence[float] | None = None) -> tuple[Array, bool]:
        """An image as (C, Z, H, W), and whether it lacks the axis Z."""
        if spacing is not None and (len(spacing) != 3 or not all(math.isfinite(s) and s > 0 for s in spacing)):
            raise PclmixError(f"spacing {tuple(spacing)} must be three lengths in mm, along Z, H, W")
        if isinstance(image, Path | str):
            array, geometry = self.read(channel_files(Path(image), len(self.about.channels))[1])
            return array, geometry.header is None and geometry.shape[0] == 1
        return array_to_image(image, self.about.channels)

    def batches(self, image: Array) -> Iterator[Array]:
        """Preprocessed slices (B, C, h, w) of an image (C, Z, H, W), in batches."""
        limits = intensity_range(image, "volume") if self.about.intensity == "volume" else None
        for first in range(0, image.shape[1], self.batch):
            part = image[:, first : first + self.batch]
            yield np.ascontiguousarray(self.about.preprocessing.images(part, limits))

    def label(self, batches: Iterable[Array], size: tuple[int, int], tta: TTA = "none") -> Array:
        """Labels (Z, *size) of prepared slices."""
        return np.concatenate(list(self._run(batches, size, tta, "labels")))

    def uncertain_batches(
        self, batches: Iterable[Array], size: tuple[int, int], tta: TTA = "none"
    ) -> Iterator[tuple[Array, Array]]:
        """For each batch of prepared slices: labels (B, H, W) and probabilities q (B, K, H, W).

        q is equation 6 where the model has both decoders, else the probabilities behind the labels.
        """
        kind = np.uint8 if self.about.labels.count <= 256 else np.int16
        for q in self._run(self.few(batches, size), size, tta, "probabilities"):
            yield q.argmax(1).astype(kind), q

    def few(self, batches: Iterable[Array], size: tuple[int, int]) -> Iterator[Array]:
        """The same slices in batches whose scores at native size stay within EXAMINED_AT_ONCE."""
        count = max(1, EXAMINED_AT_ONCE // (self.about.labels.count * size[0] * size[1]))
        for batch in batches:
            for first in range(0, len(batch), count):
                yield batch[first : first + count]

    def largest(self, labels: Array) -> Array:
        """The largest 3D component of each class."""
        # Imported here: SciPy is optional in pclmix-runtime.
        try:
            from pclmix.labels import largest_component as keep_largest
        except ImportError as error:
            raise PclmixError("--largest-component needs the package scipy: pip install scipy") from error
        return keep_largest(labels, range(1, self.about.labels.count))

    def _scores(self, image: Image, spacing: Sequence[float] | None, tta: TTA, wanted: Wanted) -> Array:
        require_one_of("tta", tta, get_args(TTA))
        array, flat = self.open(image, spacing)
        scores = np.concatenate(list(self._run(self.batches(array), _size(array), tta, wanted)))
        return scores[0] if flat else scores


def _fits(patch: Any, size: tuple[int, int]) -> bool:
    return len(patch) == 2 and all(type(n) is int and 0 < n <= most for n, most in zip(patch, size, strict=True))


def is_temperature(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _LARGEST


def _is_range(window: Any) -> bool:
    numbers = all(type(value) in (int, float) and abs(value) <= _LARGEST for value in window)
    return numbers and len(window) == 2 and bool(window[0] < window[1])


def _size(image: Array) -> tuple[int, int]:
    return image.shape[2], image.shape[3]

"""What every predictor does, whatever runs its network: slices in, label maps at the image's own size out.

Nothing here needs torch: a network that runs elsewhere fills in `_run` and is a predictor.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pclmix.data.store import Settings, intensity_range, prepare_image
from pclmix.data.volume import Geometry, require_ending, stem_of, write_labels
from pclmix.errors import PclmixError, require_one_of
from pclmix.files import write_json
from pclmix.labels import Labels
from pclmix.predict.inputs import channel_files, read_images
from pclmix.predict.uncertainty import Examined, examine

log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
TTA = Literal["none", "flip"]
Precision = Literal["auto", "32", "bf16"]
Wanted = Literal["labels", "probabilities", "logits"]
SCORES_AT_ONCE = 2**26  #: numbers of (B, K, H, W) held at native size, whatever that size is
#: Axes of (B, C, H, W) that test-time flips turn over: none, W, H, both.
FLIPS: tuple[tuple[int, ...], ...] = ((), (3,), (2,), (2, 3))


@dataclass(frozen=True)
class About:
    """What a model says of itself."""

    source: str  #: the file or folder it was loaded from
    identity: str  #: changes when the weights do
    labels: Labels
    channels: tuple[str, ...]
    size: tuple[int, int]  #: what every slice is resized to, H and W
    intensity: Literal["slice", "volume"]
    dataset: str = ""  #: name of the dataset it was trained on
    trained_on: tuple[str, ...] = ()  #: the cases of it that training saw
    temperature: float = 1.0  #: logits are divided by it before the softmax; `pclmix calibrate` finds it
    offset: dict[str, float] = field(default_factory=dict)  #: class: what its score has been given
    turned: bool = True  #: training saw images turned and flipped, so that flips show nothing new

    @property
    def settings(self) -> Settings:
        return Settings(self.size, self.intensity)


def warn_of_flips(model: str) -> None:
    """`model` says what was, or is to be, trained so."""
    log.warning(
        "%s without turns and flips (augment.quarter_turns=0): flips show it images such as it has never seen, and "
        "its predictions may be much worse; leave --tta flip out",
        model,
    )


class Predictor(ABC):
    """A model that is ready to predict. `batch` slices go through the network at once."""

    def __init__(self, about: About, batch: int) -> None:
        if batch < 1:
            raise PclmixError(f"--batch {batch}: at least one slice must go through the network at once")
        self.about = about
        self.batch = batch
        self._warned = False

    @abstractmethod
    def _run(self, batches: Iterable[Array], size: tuple[int, int], tta: TTA, wanted: Wanted) -> Iterator[Array]:
        """For each batch of prepared slices (B, C, h, w): labels (B, H, W), or scores (B, K, H, W) in float32.

        Scores are resized to `size`, then the largest is the label. `flip` averages the softmax over FLIPS. A softmax
        is that of logits / temperature.
        """

    def check_tta(self, tta: TTA) -> None:
        """Refuse an unknown way, and warn once of flips that the network has never seen: they can cost much."""
        require_one_of("tta", tta, get_args(TTA))
        if tta == "flip" and not self.about.turned and not self._warned:
            self._warned = True
            warn_of_flips(f"{self.about.source} was trained")

    def predict(
        self,
        array: Array,
        spacing: Sequence[float] | None = None,
        *,
        tta: TTA = "none",
        largest_component: bool = False,
    ) -> Array:
        """Labels (Z, H, W) of an image (C, Z, H, W), or of one channel as (Z, H, W) or (H, W).

        Intensities may be in any unit. `spacing`, (z, y, x) in mm, describes the array; slices are predicted pixel by
        pixel and do not depend on it. Memory beyond image and result is that of a few batches of slices.
        """
        self.check_tta(tta)
        image = self.as_image(array, spacing)
        labels = self.label(self.batches(image), (image.shape[2], image.shape[3]), tta)
        return self.largest(labels) if largest_component else labels

    def probabilities(self, array: Array, spacing: Sequence[float] | None = None, *, tta: TTA = "none") -> Array:
        """Softmax (Z, K, H, W) at the image's own size, float32."""
        return self._scores(array, spacing, tta, "probabilities")

    def probability_batches(self, array: Array, *, tta: TTA = "none") -> Iterator[Array]:
        """As `probabilities`, a batch of slices (B, K, H, W) at a time: memory stays small whatever the volume."""
        self.check_tta(tta)
        image = self.as_image(array)
        return self._run(self.batches(image), (image.shape[2], image.shape[3]), tta, "probabilities")

    def logits(self, array: Array, spacing: Sequence[float] | None = None) -> Array:
        """Logits (Z, K, H, W) resized to the image's own size, float32."""
        return self._scores(array, spacing, "none", "logits")

    def predict_file(
        self, image: Path | str, out: Path | str, *, tta: TTA = "none", largest_component: bool = False
    ) -> Array:
        """Predict one image (CASE_0000 stands for all its channels), write the labels over its grid, return them."""
        require_ending(Path(out))  # before the work
        array, geometry = self.read(channel_files(Path(image), len(self.about.channels))[1])
        labels = self.predict(array, geometry.spacing, tta=tta, largest_component=largest_component)
        self.write(Path(out), labels, geometry)
        return labels

    def read(self, paths: Sequence[Path]) -> tuple[Array, Geometry]:
        """The channels of one image, as many as the model takes."""
        volume = read_images(paths, len(self.about.channels))
        return volume.array, volume.geometry

    def write(self, path: Path, labels: Array, like: Geometry) -> None:
        """Write a label map; a picture has no header, so its spacing goes beside it, as nnU-Net wants it."""
        write_labels(path, labels, like, self.about.labels.names)
        if like.header is None and like.spacing != (1.0, 1.0, 1.0):
            write_json(path.with_name(f"{stem_of(path)}.json"), {"spacing": list(like.spacing)})

    def as_image(self, array: Array, spacing: Sequence[float] | None = None) -> Array:
        """`array` as (C, Z, H, W); refuses what the network cannot take."""
        array = np.asarray(array)
        count = len(self.about.channels)
        if array.ndim not in (2, 3, 4) or (array.ndim < 4 and count > 1):
            wanted = "(Z, H, W) or (H, W)" if count == 1 else f"({count}, Z, H, W)"
            raise PclmixError(f"an image of shape {array.shape} cannot be predicted; this model takes {wanted}")
        image = array[(None,) * (4 - array.ndim)]
        if image.shape[0] != count:
            names = ", ".join(self.about.channels)
            raise PclmixError(f"the image has {image.shape[0]} channels, the model takes {count} ({names})")
        if 0 in image.shape:
            raise PclmixError(f"the image is empty: its shape is {image.shape[1:]} (Z, H, W)")
        if image.dtype.kind not in "iufb" or (image.dtype.kind == "f" and not np.isfinite(image).all()):
            raise PclmixError("the image holds NaN, infinite or non-numeric values; repair it before predicting")
        if spacing is not None and (len(spacing) != 3 or min(spacing) <= 0):
            raise PclmixError(f"spacing {tuple(spacing)} must be three lengths in mm, along Z, H, W")
        return image

    def batches(self, image: Array) -> Iterator[Array]:
        """The slices (B, C, h, w) of an image (C, Z, H, W) as the network sees them, a batch at a time."""
        limits = intensity_range(image, "volume") if self.about.intensity == "volume" else None
        for first in range(0, image.shape[1], self.batch):
            part = prepare_image(image[:, first : first + self.batch], self.about.settings, limits)
            yield np.ascontiguousarray(part)

    def label(self, batches: Iterable[Array], size: tuple[int, int], tta: TTA = "none") -> Array:
        """Labels (Z, *size) of prepared slices."""
        return np.concatenate(list(self._run(batches, size, tta, "labels")))

    def uncertain_batches(
        self, batches: Iterable[Array], size: tuple[int, int], tta: TTA = "none"
    ) -> Iterator[tuple[Array, Array]]:
        """For each batch of prepared slices: labels (B, H, W) and q (B, K, H, W), the probabilities to judge them by.

        q is equation 6 where the model has both decoders, else the probabilities of the one there is.
        """
        kind = np.uint8 if self.about.labels.count <= 256 else np.int16
        for q in self._run(self.few(batches, size), size, tta, "probabilities"):
            yield q.argmax(1).astype(kind), q

    def few(self, batches: Iterable[Array], size: tuple[int, int]) -> Iterator[Array]:
        """The same slices in batches so small that their scores at native size stay within SCORES_AT_ONCE."""
        count = max(1, SCORES_AT_ONCE // (self.about.labels.count * size[0] * size[1]))
        for batch in batches:
            for first in range(0, len(batch), count):
                yield batch[first : first + count]

    def examine(self, array: Array, *, tta: TTA = "none") -> Examined:
        """Labels, entropy (equation 5) and a quality estimate of an image; no reference is needed."""
        self.check_tta(tta)
        image = self.as_image(array)
        return examine(self.uncertain_batches(self.batches(image), (image.shape[2], image.shape[3]), tta))

    def largest(self, labels: Array) -> Array:
        """The largest 3D component of each class."""
        # Imported here: SciPy is needed for nothing else, and pclmix-runtime does without it.
        try:
            from pclmix.data.components import largest_component as keep_largest
        except ImportError as error:
            raise PclmixError("--largest-component needs SciPy: pip install scipy") from error
        return keep_largest(labels, range(1, self.about.labels.count))

    def _scores(self, array: Array, spacing: Sequence[float] | None, tta: TTA, wanted: Wanted) -> Array:
        self.check_tta(tta)
        image = self.as_image(array, spacing)
        return np.concatenate(list(self._run(self.batches(image), (image.shape[2], image.shape[3]), tta, wanted)))

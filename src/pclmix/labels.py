"""Label maps: class names, colours, the ignore label, connected components."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pclmix.errors import PclmixError, nearest

#: Not annotated. Negative, so that `label >= 0` means "scribbled" and no class can collide with it.
IGNORE = -1

#: Background first; distinct on a grey image and for colour-blind readers (after Okabe and Ito).
COLOURS = ("#000000", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#999999")

IntArray = npt.NDArray[np.int16]

#: With at most this many values a label map and a coarse image cannot be told apart.
FEW = 16


@dataclass(frozen=True)
class Labels:
    """The classes of a dataset: `names[k]` is class k, background first; `ignore` is the value in files."""

    names: tuple[str, ...]
    ignore: int | None

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise PclmixError("labels need the background and at least one class")

    @property
    def count(self) -> int:
        """K, the number of classes, background included and ignore not."""
        return len(self.names)

    @property
    def foreground(self) -> tuple[str, ...]:
        return self.names[1:]

    def index(self, name: str, key: str) -> int:
        """The number of a class by its name; `key` is the setting that names it, for the message."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise PclmixError(f"{key}: there is no class '{name}' here.{nearest(str(name), self.names)} Known: {known}")
        return self.names.index(name)

    @classmethod
    def generic(cls, count: int) -> Labels:
        """Names "1", "2", ... for a bare folder of masks with `count` classes."""
        return cls(("background", *(str(k) for k in range(1, count))), None)

    @classmethod
    def from_json(cls, table: Any, where: str) -> Labels:
        """Read the `labels` table of dataset.json; `where` names the file for messages."""
        if not isinstance(table, dict) or not table:
            raise PclmixError(f'{where}: \'labels\' must be a table such as {{"background": 0, "RV": 1, "ignore": 2}}')
        for name, value in table.items():
            if isinstance(value, list):
                raise PclmixError(
                    f"{where}: label '{name}' is a region (a list); regions are not supported, "
                    "give each class one number"
                )
            if not isinstance(value, int) or isinstance(value, bool):
                raise PclmixError(f"{where}: label '{name}' has the value {value!r}; it must be a whole number")
        if len(set(table.values())) != len(table):
            raise PclmixError(f"{where}: two labels share one value in {table}")
        if "background" not in table or table["background"] != 0:
            hint = "" if "background" in table else nearest("background", table)
            raise PclmixError(f"{where}: labels must name 'background' with the value 0.{hint}")
        ignore = table.get("ignore")
        classes = sorted((v, n) for n, v in table.items() if n != "ignore")
        if [v for v, _ in classes] != list(range(len(classes))):
            raise PclmixError(
                f"{where}: label values must be 0, 1, 2, ... without a gap, found {[v for v, _ in classes]}"
            )
        if ignore is not None and ignore != len(classes):
            raise PclmixError(f"{where}: 'ignore' must be the highest label, {len(classes)}, not {ignore}")
        return cls(tuple(n for _, n in classes), ignore)

    def to_json(self) -> dict[str, int]:
        table = {name: k for k, name in enumerate(self.names)}
        if self.ignore is not None:
            table["ignore"] = self.ignore
        return table

    def decode(self, array: npt.NDArray[Any], where: str) -> IntArray:
        """File values to classes and IGNORE; values missing in dataset.json are refused."""
        allowed = self.count if self.ignore is None else self.count + 1
        if array.size and (array.min() < 0 or array.max() >= allowed):
            bad = [int(v) for v in np.unique(array) if not 0 <= v < allowed]
            shown = ", ".join(str(v) for v in bad[:5]) + (", ..." if len(bad) > 5 else "")
            image = looks_like_image(array)
            way_out = "it looks like an image; give the label map" if image else "correct the file"
            more = "" if image else " or add the class to 'labels'"
            raise PclmixError(
                f"{where}: label values {shown} are not in dataset.json (0 to {allowed - 1}); {way_out}{more}"
            )
        out = array.astype(np.int16)
        if self.ignore is not None:
            out[out == self.ignore] = IGNORE
        return out

    def encode(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Classes and IGNORE to the values of a file, in the smallest unsigned type that holds them."""
        top = self.count - 1 if self.ignore is None else self.ignore
        if self.ignore is None and bool((array == IGNORE).any()):
            raise PclmixError("these labels have no 'ignore' value, but the map has pixels that are not annotated")
        out = np.where(array == IGNORE, self.ignore if self.ignore is not None else 0, array)
        return out.astype(np.uint8 if top < 256 else np.uint16)

    def colours(self) -> tuple[str, ...]:
        return tuple(palette(self.count))


def looks_like_image(array: npt.NDArray[Any]) -> bool:
    """Whether whole numbers (Z, H, W) are grey values rather than labels.

    They are if there are more than FEW of them and, outside the surrounding 0, more than a third of neighbours in a
    slice differ. Labels form regions: in ACDC's masks at most 6 % of neighbours differ, in its images at least 53 %.
    """
    if len(np.unique(array)) <= FEW:
        return False
    here, right, below = array[..., :-1, :-1], array[..., :-1, 1:], array[..., 1:, :-1]
    inside = (here != 0) & (right != 0) & (below != 0)
    differ = np.count_nonzero(inside & (here != right)) + np.count_nonzero(inside & (here != below))
    return bool(3 * differ > 2 * np.count_nonzero(inside))


def palette(count: int) -> Sequence[str]:
    """`count` colours as #rrggbb, background first; beyond the table, hues evenly turned by the golden angle."""
    import colorsys

    extra = []
    for k in range(len(COLOURS), count):
        r, g, b = colorsys.hsv_to_rgb((k * 0.381966) % 1.0, 0.65, 0.9)
        extra.append(f"#{round(r * 255):02x}{round(g * 255):02x}{round(b * 255):02x}")
    return [*COLOURS, *extra][:count]


def snap_labels(labels: Labels) -> str:
    """Names and colours as an ITK-SNAP label description, which 3D Slicer and others read too."""
    lines = ["# ITK-SnAP Label Description File", "# IDX  -R-  -G-  -B-  -A--  VIS MSH  LABEL"]
    for k, (name, colour) in enumerate(zip(labels.names, labels.colours(), strict=True)):
        r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        shown = int(k > 0)
        lines.append(f'{k:5d} {r:5d} {g:4d} {b:4d} {shown:8d} {shown:4d} {shown:3d}    "{name}"')
    return "\n".join(lines) + "\n"


Array = npt.NDArray[Any]


def largest_component(labels: Array, classes: Iterable[int]) -> Array:
    """Keep the largest 3D component of each class of `labels` (Z, H, W); its other voxels become background, 0.

    Voxels that touch by a corner are connected: slices lie far apart, and the heart moves sideways between them.
    A class that is absent stays absent; of two components of one size the first in array order is kept. The input
    is not changed.

    >>> largest_component(np.array([[[1, 1, 0, 1, 2]]]), (1, 2)).tolist()
    [[[1, 1, 0, 0, 2]]]
    """
    from scipy import ndimage

    kept = labels.copy()
    touching = np.ones((3,) * labels.ndim, dtype=bool)
    for k in classes:
        parts, count = ndimage.label(labels == k, structure=touching)
        if count > 1:
            sizes = np.bincount(parts.ravel())[1:]
            kept[(parts > 0) & (parts != 1 + int(sizes.argmax()))] = 0
    return kept

"""What the values of label files mean: classes, and the value where nothing is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pclmix.data.importers.base import Options, Values, listed
from pclmix.errors import PclmixError
from pclmix.io.threads import in_threads
from pclmix.io.volume import read_labels
from pclmix.labels import Labels

_MOST = 65535  # range of 16-bit label files


def meaning(options: Options, scribbles: Sequence[Path], folder: Path) -> tuple[Labels, Values, tuple[str, ...]]:
    """The classes; for each value of a scribble file, the class or the ignore label it stands for; remarks.

    The ignore value is --ignore, else the highest value if it is also the most frequent, since a scribble leaves most
    pixels unlabelled. In any other case the user is asked.
    """
    counts: Counter[int] = Counter()
    for found in in_threads(_count, scribbles, "reading"):
        counts.update(found)
    ignore = options.ignore
    if ignore is None:
        ignore, common = max(counts), counts.most_common(1)[0][0]
        if ignore != common:
            raise PclmixError(
                f"{folder}: which value means 'nothing drawn'? Most pixels hold {common}, the highest value is "
                f"{ignore}; add --ignore {common} or --ignore {ignore}"
            )
    drawn = sorted(set(counts) - {ignore})
    if not drawn:
        raise PclmixError(f"{folder}: the scribbles hold only {ignore}, 'nothing drawn'")
    names, numbers = _classes(options.classes, ignore, drawn, folder)
    labels = Labels(names, len(names))
    unknown = sorted(set(drawn) - set(numbers))
    if unknown:
        raise PclmixError(
            f"{folder}: the scribbles hold {listed(unknown)}, which no class has; "
            f"the classes are {listed((f'{n}={v}' for n, v in zip(names, numbers, strict=True)), 20)}"
        )
    doubts = () if ignore in counts else (f"no pixel of {folder} holds {ignore}, 'nothing drawn': is --ignore right?",)
    return labels, {**{v: k for k, v in enumerate(numbers)}, ignore: len(names)}, doubts


def _count(path: Path) -> dict[int, int]:
    found: Counter[int] = Counter()
    for plane in read_labels(path)[0]:
        values, counts = np.unique(plane, return_counts=True)
        found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return found


def _classes(
    given: Sequence[str], ignore: int, drawn: Sequence[int], folder: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and file values, background first: NAME=VALUE, or NAME alone for 0, 1, 2, ... with `ignore` left out."""
    if not given:
        free = [v for v in range(drawn[-1] + 1) if v != ignore]
        if list(drawn) != free or len(free) < 2:
            raise PclmixError(
                f"{folder}: the scribbles hold the values {listed(drawn)} besides {ignore} (nothing drawn), which are "
                "not background and classes without a gap; name them with --classes background=VALUE,NAME=VALUE,..."
            )
        return Labels.generic(len(free)).names, tuple(free)
    pairs = [item.partition("=") for item in given]
    names = tuple(name.strip() for name, _, _ in pairs)
    if len(set(names)) != len(names) or "ignore" in names or "" in names or len(names) < 2:
        raise PclmixError(f"--classes {','.join(given)}: the background and at least one class, each named once")
    try:
        free = [v for v in range(len(names) + 1) if v != ignore]
        numbers = tuple(int(value) if equals else free[k] for k, (_, equals, value) in enumerate(pairs))
    except ValueError:
        raise PclmixError(f"--classes {','.join(given)}: the value after '=' must be a whole number") from None
    if len({*numbers, ignore}) != len(numbers) + 1 or not all(abs(v) <= _MOST for v in numbers):
        raise PclmixError(f"--classes {','.join(given)}: each class needs its own value, none of them {ignore}")
    return ("background", *names[1:]), numbers


def mask_meaning(masks: Sequence[Path], labels: Labels, scribble: Values) -> Values:
    """Masks use the values of the scribbles if these include all of theirs; else 0, 1, 2, ..."""
    found = set().union(*in_threads(_count, masks, "reading")) if masks else set()
    shared = {value: k for value, k in scribble.items() if k != labels.ignore}
    return shared if found <= set(shared) else {k: k for k in range(labels.count)}

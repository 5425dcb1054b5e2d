"""Plain folders: images, scribbles and, optionally, dense masks, matched by name.

SRC/images, SRC/scribbles and SRC/masks; or SRC holds the images and --scribbles, --masks name the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from pclmix.data.dataset import read_channels
from pclmix.data.importers.base import (
    IMPORTERS,
    Options,
    Plan,
    Sources,
    Values,
    copy_case,
    listed,
    need_folder,
)
from pclmix.data.volume import ENDINGS, ending_of, read_image, read_labels, stem_of
from pclmix.errors import PclmixError, nearest
from pclmix.labels import Labels
from pclmix.progress import in_threads

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
_LABEL_SUFFIX = re.compile(r"_(?:scribbles?|gt|masks?|labels?|seg)$", re.IGNORECASE)
_SUBFOLDERS = {
    "images": ("images", "imagesTr"),
    "scribbles": ("scribbles", "labelsTr"),
    "masks": ("masks", "referenceTr"),
}
_MOST = 65535  # what a label file of 16 bits can hold


@IMPORTERS.register("folder")
def plan(source: Path, options: Options) -> Plan:
    """Match names, find out what the label values mean, and write each case as it is."""
    options.only("folder", "scribbles", "masks", "classes", "ignore")
    images, scribbles, masks = _folders(source, options)
    scribble_files, mask_files = _labels(scribbles), _labels(masks) if masks else {}
    files = _match(images, scribble_files, mask_files)
    endings = Counter(ending_of(path) for sources in files.values() for path in sources.images)
    ending = endings.most_common(1)[0][0]
    labels, values, doubts = _meaning(options, [s.scribble for s in files.values()], scribbles)
    mask_values = _mask_meaning([s.mask for s in files.values() if s.mask], labels, values)
    channels = _channels(next(iter(files.values())))
    write = partial(_write, files, ending, len(channels), values, mask_values)
    notes = tuple(f"{path} has no image and was left out" for case, path in mask_files.items() if case not in files)
    return Plan(channels, labels, ending, tuple(sorted(files)), write, (*doubts, *notes))


def _write(
    files: dict[str, Sources], ending: str, channels: int, scribble: Values, mask: Values, case: str, folder: Path
) -> None:
    copy_case(case, files[case], folder, ending=ending, channels=channels, scribble_values=scribble, mask_values=mask)


def _folders(source: Path, options: Options) -> tuple[Path, Path, Path | None]:
    given = {"images": None, "scribbles": options.scribbles, "masks": options.masks}
    found = {kind: given[kind] or _subfolder(source, names) for kind, names in _SUBFOLDERS.items()}
    images = found["images"] or source
    scribbles, masks = found["scribbles"], found["masks"]
    if scribbles is None:
        way = "draw some from the masks with `pclmix scribble MASKS OUT`" if masks else "say where they are"
        raise PclmixError(f"{source} has no subfolder 'scribbles'; {way} and give the folder with --scribbles")
    for folder in (images, scribbles, masks):
        if folder is not None:
            need_folder(folder)
    return images, scribbles, masks


def _subfolder(source: Path, names: Iterable[str]) -> Path | None:
    return next((source / name for name in names if (source / name).is_dir()), None)


def _listing(folder: Path) -> list[Path]:
    """The image files of a folder or, where it holds none itself, of the folders below it."""
    for found in (folder.iterdir(), folder.rglob("*")):
        paths = sorted(p for p in found if ending_of(p) and not p.name.startswith("."))
        if paths:
            break
    if not paths:
        raise PclmixError(f"{folder} holds no image files; known endings are {', '.join(ENDINGS)}")
    return paths


def _labels(folder: Path) -> dict[str, Path]:
    """Case to file; `_scribble`, `_gt`, `_mask`, `_label` or `_seg` at the end of a name is not part of the case."""
    found: dict[str, Path] = {}
    for path in _listing(folder):
        case = _LABEL_SUFFIX.sub("", stem_of(path)) or stem_of(path)
        if case in found:
            raise PclmixError(f"{found[case]} and {path} are labels of one case, '{case}'; keep one of them")
        found[case] = path
    return found


def _match(images: Path, scribbles: dict[str, Path], masks: dict[str, Path]) -> dict[str, Sources]:
    """Images by case; `CASE_0001` is channel 1 of CASE where the scribble is named CASE, else a case of its own."""
    channels: dict[str, dict[int, Path]] = {}
    for path in _listing(images):
        stem = stem_of(path)
        match = _CHANNEL.match(stem)
        case, channel = stem, 0
        if stem not in scribbles and match and match.group("case") in scribbles:
            case, channel = match.group("case"), int(match.group("channel"))
        if case not in scribbles:
            hint = nearest(case, scribbles).replace("Did you mean", "Is it")
            raise PclmixError(
                f"{path} has no scribble named '{case}'.{hint} Add the scribble (`pclmix scribble` draws one from a "
                "dense mask), or move the image away"
            )
        other = channels.setdefault(case, {}).setdefault(channel, path)
        if other != path:
            raise PclmixError(f"{other} and {path} are the same image twice; keep one of them")
    for case, path in scribbles.items():
        if case not in channels:
            raise PclmixError(f"{path} is a scribble without an image named '{case}'.{nearest(case, channels)}")
    count = max(len(found) for found in channels.values())
    for case, found in channels.items():
        if sorted(found) != list(range(count)):
            raise PclmixError(
                f"{next(iter(found.values()))}: case '{case}' has the channels {listed(sorted(found))}; "
                f"every case needs 0 to {count - 1}"
            )
    return {
        case: Sources(tuple(found[c] for c in sorted(found)), scribbles[case], masks.get(case))
        for case, found in sorted(channels.items())
    }


def _channels(first: Sources) -> tuple[str, ...]:
    """One channel a file, except a colour picture, which has three in one."""
    if len(first.images) > 1:
        return tuple(f"channel {c}" for c in range(len(first.images)))
    array = read_image(first.images[0]).array
    if array.shape[0] == 3 and not bool((array == array[:1]).all()):
        return "R", "G", "B"
    read_channels(first.images, 1)
    return ("image",)


def _meaning(options: Options, scribbles: Sequence[Path], folder: Path) -> tuple[Labels, Values, tuple[str, ...]]:
    """The classes; for each value of a scribble file, the class or the ignore label it stands for; remarks.

    Unannotated is --ignore, else the highest value if it is also the commonest: a scribble leaves most pixels
    untouched. Anything else is a question for the user, not a guess.
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
                f"{ignore}; say it with --ignore {common} or --ignore {ignore}"
            )
    drawn = sorted(set(counts) - {ignore})
    if not drawn:
        raise PclmixError(f"{folder}: the scribbles hold nothing but {ignore}, 'nothing drawn'")
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
    values, counts = np.unique(read_labels(path)[0], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _classes(
    given: Sequence[str], ignore: int, drawn: Sequence[int], folder: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and file values, background first: NAME=VALUE, or NAME alone for 0, 1, 2, ... with `ignore` left out."""
    if not given:
        free = [v for v in range(drawn[-1] + 1) if v != ignore]
        if list(drawn) != free or len(free) < 2:
            raise PclmixError(
                f"{folder}: the scribbles hold the values {listed(drawn)} beside {ignore} (nothing drawn), which are "
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


def _mask_meaning(masks: Sequence[Path], labels: Labels, scribble: Values) -> Values:
    """Masks share the scribbles' values where all of theirs are among them; else they hold 0, 1, 2, ..."""
    found = set().union(*in_threads(_count, masks, "reading")) if masks else set()
    shared = {value: k for value, k in scribble.items() if k != labels.ignore}
    return shared if found <= set(shared) else {k: k for k in range(labels.count)}

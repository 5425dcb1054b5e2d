"""Plain folders: images, scribbles and, optionally, dense masks, matched by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from pclmix.data.importers.values import mask_meaning, meaning
from pclmix.errors import PclmixError, nearest
from pclmix.io.volume import ENDINGS, PHOTOS, ending_of, image_ending_of, read_image, stem_of
from pclmix.labels import Labels

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
_LABEL_SUFFIX = re.compile(r"(^|_)(?:scribbles?|gt|masks?|labels?|seg)$", re.IGNORECASE)
_SCRIBBLE_SUFFIX = re.compile(r"(^|_)scribbles?$", re.IGNORECASE)
_SUBFOLDERS = {
    "images": ("images", "imagesTr"),
    "scribbles": ("scribbles", "labelsTr"),
    "masks": ("masks", "referenceTr"),
}
#: Strokes of one class as two maps: positive and negative.
_POSITIVE, _NEGATIVE = ("positive", "pos"), ("negative", "neg")


@IMPORTERS.register("folder")
def plan(source: Path, options: Options) -> Plan:
    """Match names, determine the meaning of label values, and copy each case."""
    options.only("folder", "scribbles", "masks", "classes", "ignore", "skip_unmatched", "dense", "unlabelled")
    images, scribbles, masks = _folders(source, options)
    negatives = _subfolder(scribbles, _NEGATIVE)
    positives = _subfolder(scribbles, _POSITIVE) if negatives else None
    mixed = masks is not None and scribbles.resolve() == masks.resolve()
    scribble_files = _labels(positives or scribbles, images, mixed, _is_scribble)
    mask_files = _labels(masks, images, mixed, _is_mask) if masks else {}
    pictures = _pictures(images, without=[f for f in (scribbles, masks) if f is not None])
    files, notes = _match(pictures, scribble_files, mask_files, options)
    if positives and negatives:
        files, more = _with_negatives(files, _labels(negatives, images, False, _is_scribble), options)
        labels, doubts = _one_class(options), more
        values: Values = {0: 0, 1: 1}
    else:
        drawn = [sources.scribble for sources in files.values() if sources.scribble]
        labels, values, doubts = meaning(options, drawn, scribbles)
    mask_values = mask_meaning([s.mask for s in files.values() if s.mask], labels, values)
    endings = Counter(ending_of(path) or ".png" for sources in files.values() for path in sources.images)
    ending = endings.most_common(1)[0][0]
    channels = _channels(next(iter(files.values())))
    write = partial(_write, files, ending, len(channels), values, mask_values, labels.count)
    return Plan(channels, labels, ending, tuple(sorted(files)), write, (*doubts, *notes))


def _write(
    files: dict[str, Sources],
    ending: str,
    channels: int,
    scribble: Values,
    mask: Values,
    ignore: int,
    case: str,
    folder: Path,
) -> None:
    values: dict[str, Values] = {"scribble_values": scribble, "mask_values": mask}
    copy_case(case, files[case], folder, ending=ending, channels=channels, ignore=ignore, **values)


def _folders(source: Path, options: Options) -> tuple[Path, Path, Path | None]:
    given = {"images": None, "scribbles": options.scribbles, "masks": options.masks}
    found = {kind: given[kind] or _subfolder(source, names) for kind, names in _SUBFOLDERS.items()}
    images = found["images"] or source
    scribbles, masks = found["scribbles"], found["masks"]
    if scribbles is None:
        several = sorted(p.name for p in source.glob("scribbles*") if p.is_dir())
        if several:
            raise PclmixError(
                f"{source} holds {listed(several)}: give one of them, such as --scribbles {source / several[0]}"
            )
        way = "draw some from the masks with `pclmix scribble MASKS OUT`" if masks else "say where they are"
        raise PclmixError(f"{source} has no subfolder 'scribbles'; {way} and give the folder with --scribbles")
    for folder in (images, scribbles, masks):
        if folder is not None:
            need_folder(folder)
    for folder, name in ((scribbles, "scribbles"), (masks, "masks")):
        if folder is not None and folder.resolve() == images.resolve() and not _told_apart(folder):
            raise PclmixError(f"--{name} {folder} is the folder of the images; put them into different folders")
    return images, scribbles, masks


def _subfolder(source: Path, names: Iterable[str]) -> Path | None:
    return next((source / name for name in names if (source / name).is_dir()), None)


def _listing(folder: Path, ending: Callable[[Path], str] = ending_of, without: Collection[Path] = ()) -> list[Path]:
    """The image files of a folder or, where it holds none itself, of the folders below it except those in `without`."""
    other = [path.resolve() for path in without if path.resolve() != folder.resolve()]
    for found in (folder.iterdir(), folder.rglob("*")):
        paths = sorted(p for p in found if ending(p) and not p.name.startswith("."))
        paths = [p for p in paths if not any(p.resolve().is_relative_to(o) for o in other)]
        if paths:
            return paths
    also = f", {', '.join(PHOTOS)}" if ending is image_ending_of else ""
    raise PclmixError(f"{folder} holds no image files; known endings are {', '.join(ENDINGS)}{also}")


def _is_label(path: Path) -> bool:
    return _LABEL_SUFFIX.search(stem_of(path)) is not None


def _is_scribble(path: Path) -> bool:
    return _SCRIBBLE_SUFFIX.search(stem_of(path)) is not None


def _is_mask(path: Path) -> bool:
    return not _is_scribble(path)


def _told_apart(folder: Path) -> bool:
    """Whether images and labels are in one tree, with labels named SCRIBBLE, NAME_gt and so on."""
    paths = _listing(folder, image_ending_of)
    return any(map(_is_label, paths)) and not all(map(_is_label, paths))


def _by_folder(paths: Sequence[Path], folder: Path, stems: Sequence[str]) -> list[str]:
    """The cases: `stems` or, where each case has a folder of its own with a file of the same name, the folders."""
    files = Counter(path.parent for path in paths)
    if folder in files or max(files.values()) > 1 or len(set(stems)) == len(stems):
        return list(stems)
    return ["_".join(path.relative_to(folder).parent.parts) for path in paths]


def _pictures(folder: Path, without: Collection[Path]) -> dict[Path, str]:
    """Image files, and their names; labels in the same tree are left out."""
    paths = _listing(folder, image_ending_of, without)
    if not all(map(_is_label, paths)):
        paths = [path for path in paths if not _is_label(path)]
    return dict(zip(paths, _by_folder(paths, folder, [stem_of(path) for path in paths]), strict=True))


def _labels(folder: Path, images: Path, mixed: bool, wanted: Callable[[Path], bool]) -> dict[str, Path]:
    """Case to file; `_scribble`, `_gt`, `_mask`, `_label` or `_seg` at the end of a name is not part of the case.

    A folder may also hold the images or, if `mixed`, scribbles and masks; `wanted` labels are then told by their names.
    """
    found: dict[str, Path] = {}
    paths = _listing(folder)
    if folder.resolve() == images.resolve():
        paths, mixed = [path for path in paths if _is_label(path)], True
    if mixed and any(map(_is_scribble, paths)) and any(map(_is_mask, paths)):
        paths = [path for path in paths if wanted(path)]
    stems = [_LABEL_SUFFIX.sub("", stem_of(path)) or stem_of(path) for path in paths]
    for path, case in zip(paths, _by_folder(paths, folder, stems), strict=True):
        if case in found:
            raise PclmixError(f"{found[case]} and {path} are labels of one case, '{case}'; keep one of them")
        found[case] = path
    return found


def _match(
    images: dict[Path, str], scribbles: dict[str, Path], masks: dict[str, Path], options: Options
) -> tuple[dict[str, Sources], list[str]]:
    """Sources by case, and notes on skipped files.

    `CASE_0001` is channel 1 of CASE where the labels are named CASE, else a case of its own.
    """
    labelled = {**masks, **scribbles} if options.dense else scribbles
    channels: dict[str, dict[int, Path]] = {}
    bare: list[Path] = []
    parts = {stem: match for stem in images.values() if stem not in labelled and (match := _CHANNEL.match(stem))}
    numbered = any(match.group("case") in labelled for match in parts.values())
    for path, stem in images.items():
        match = parts.get(stem)
        case, channel = stem, 0
        if match and (match.group("case") in labelled or (numbered and options.unlabelled)):
            case, channel = match.group("case"), int(match.group("channel"))
        if case not in labelled and not options.unlabelled:
            bare.append(path)
            continue
        other = channels.setdefault(case, {}).setdefault(channel, path)
        if other != path:
            raise PclmixError(f"{other} and {path} are the same image twice; keep one of them")
    lonely = [path for case, path in scribbles.items() if case not in channels]
    notes = _unmatched(bare, lonely, labelled, channels, options, any(images[path] in masks for path in bare))
    count = max(len(found) for found in channels.values())
    for case, found in channels.items():
        if sorted(found) != list(range(count)):
            raise PclmixError(
                f"{next(iter(found.values()))}: case '{case}' has the channels {listed(sorted(found))}; "
                f"every case needs 0 to {count - 1}"
            )
    notes += [f"{path} has no image and was left out" for case, path in masks.items() if case not in channels]
    unlabelled = [case for case in channels if case not in labelled]
    if unlabelled:
        notes.append(f"{len(unlabelled)} cases without a scribble are unlabelled: {listed(unlabelled)}")
    dense = [case for case in channels if case in labelled and case not in scribbles]
    if dense:
        notes.append(f"{len(dense)} cases without a scribble are labelled by their dense mask: {listed(dense)}")
    return {
        case: Sources(
            tuple(found[c] for c in sorted(found)),
            scribbles.get(case),
            masks.get(case),
            unlabelled=case not in labelled,
        )
        for case, found in sorted(channels.items())
    }, notes


def _unmatched(
    bare: list[Path],
    lonely: list[Path],
    labelled: Collection[str],
    channels: Collection[str],
    options: Options,
    masked: bool,
) -> list[str]:
    """One error for all unmatched files, or notes if they are to be skipped; `masked`: a bare image has a mask."""
    said = []
    if bare:
        hint = nearest(stem_of(bare[0]), labelled).replace("Did you mean", "Is it")
        said.append(f"{len(bare)} images without a scribble of their name: {listed(bare)}.{hint}")
    if lonely:
        hint = nearest(stem_of(lonely[0]), channels).replace("Did you mean", "Is it")
        said.append(f"{len(lonely)} scribbles without an image of their name: {listed(lonely)}.{hint}")
    if said and (not options.skip_unmatched or not channels):
        way = "add what is missing (`pclmix scribble` draws scribbles from dense masks), move them away"
        way += ", label cases that have a mask by it with --dense" if masked else ""
        way += ", take images without a scribble as unlabelled cases with --unlabelled" if bare else ""
        raise PclmixError(f"{' '.join(said)} Names must match: {way}, or leave them out with --skip-unmatched")
    return [f"left out: {text}" for text in said]


def _with_negatives(
    files: dict[str, Sources], negatives: dict[str, Path], options: Options
) -> tuple[dict[str, Sources], tuple[str, ...]]:
    """Each case with its negative strokes as well."""
    alone = [case for case, sources in files.items() if sources.scribble and case not in negatives]
    alone += [case for case in negatives if case not in files]
    if alone and not options.skip_unmatched:
        raise PclmixError(
            f"{len(alone)} cases have positive strokes, negative strokes or an image alone: {listed(alone)}. "
            "Add what is missing, or leave them out with --skip-unmatched"
        )
    kept = {case: replace(s, negative=negatives.get(case)) for case, s in files.items()}
    kept = {case: s for case, s in kept.items() if s.negative or not s.scribble}
    return kept, (f"left out: {listed(alone)}",) if alone else ()


def _one_class(options: Options) -> Labels:
    """The background and the one class that was drawn."""
    names = tuple(name.partition("=")[0].strip() for name in options.classes) or ("background", "1")
    if len(names) != 2 or options.ignore is not None:
        raise PclmixError(
            "positive and negative strokes are of one class: --classes background,NAME names it; leave --ignore out"
        )
    return Labels(("background", names[1]), 2)


def _channels(first: Sources) -> tuple[str, ...]:
    """One channel per file, except colour pictures with three."""
    if len(first.images) > 1:
        return tuple(f"channel {c}" for c in range(len(first.images)))
    array = read_image(first.images[0]).array
    if array.shape[0] == 3 and not bool((array == array[:1]).all()):
        return "R", "G", "B"
    read_channels(first.images, 1)
    return ("image",)

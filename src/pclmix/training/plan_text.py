"""A plan as text: YAML with a reason behind each value, below comments on the data it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from pclmix.data.survey import Survey

Row = tuple[str, Any, str]  #: key, value, why
_COLUMN = 30  # where the reasons begin


def describe_data(found: Survey) -> Iterator[str]:
    """What was seen, as comments."""
    (z, h, w), names = found.shape, found.dataset.labels.names
    looked = f"{found.total} cases"
    if len(found.cases) < found.total:
        looked = f"{len(found.cases)} of {looked} looked at"
    kind = "pictures" if found.pictures else f"volumes of {z} slices (median)"
    (low_h, low_w), (high_h, high_w) = found.smallest, found.largest
    yield f"# {looked}: {kind}, {h} x {w} pixels ({low_h} x {low_w} to {high_h} x {high_w}),"
    yield f"# channels: {', '.join(found.dataset.channels)}."
    if found.unit == "mm":
        yield "# Spacing {:.4g} x {:.4g} x {:.4g} mm (z, y, x); slices are trained on one by one.".format(
            *found.spacing
        )
    ranges = ", ".join(f"{low:g} to {high:g}" for low, high in zip(found.low, found.high, strict=True))
    yield f"# Intensities {ranges}."
    cases, drawn = found.cases_drawn, found.drawn
    strokes = ", ".join(f"{name} in {cases[k]} cases ({drawn[k]} pixels)" for k, name in enumerate(names))
    yield f"# Strokes: {strokes}."


def named(lost: Sequence[tuple[str, str]]) -> str:
    """Classes and cases, the first few of them."""
    more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    return ", ".join(f"{name} in {case}" for name, case in lost[:5]) + more


def yaml_lines(sections: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Sections of a recipe; the one without a name is its top, where a key can be `section.key`."""
    for section, rows in sections.items():
        if section:
            yield f"{section}:"
        for key, value, why in rows:
            parent, _, last = key.rpartition(".")
            if parent:
                yield f"{parent}:"
            yield yaml_line(last, value, why, "  " if parent or section else "")


def yaml_line(key: str, value: Any, why: str, indent: str = "") -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).split("\n")[0]
    return _reasoned(f"{indent}{key}: {text}", why)


def deviation_lines(method: str, rows: Sequence[Row]) -> Iterator[str]:
    """What a method needs besides."""
    yield "deviations:"
    yield f"  {method}:"
    yield from (_reasoned(f"    - {key}={value}", why) for key, value, why in rows)


def _reasoned(start: str, why: str) -> str:
    return f"{start:<{_COLUMN}} # {why}" if why else start

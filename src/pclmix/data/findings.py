"""What a check of a dataset says: findings, shares of pixels drawn, and both together as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from pclmix.data.habits import HabitReport

_SHOWN = 3  # errors in a refusal


class Contradiction(NamedTuple):
    """One scribble pixel (slice z, row y, column x) whose class is not the reference's."""

    z: int
    y: int
    x: int
    drawn: str
    reference: str


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong; `count` and `where` are of pixels, for strokes that contradict the reference."""

    level: Literal["error", "warning"]
    kind: str
    message: str
    case: str = ""
    file: str = ""
    count: int = 0
    where: tuple[Contradiction, ...] = ()


@dataclass(frozen=True)
class ClassShare:
    """How much of a class was drawn: pixels, their share of all pixels, and the number of cases with a stroke.

    `kept` is the share of the pixels that strokes at the working size still show.
    """

    name: str
    pixels: int
    share: float
    cases: int
    kept: float = 1.0


@dataclass(frozen=True)
class Report:
    """What `check` found."""

    dataset: str
    cases: int = 0
    references: int = 0
    classes: tuple[ClassShare, ...] = ()
    findings: tuple[Finding, ...] = ()
    habits: tuple[HabitReport, ...] = ()  #: stated ones, and others that seem to hold
    size: tuple[int, int] = (0, 0)  #: the working size that `kept` speaks of

    @property
    def suggested_habits(self) -> dict[str, list[str]]:
        """Habits that seem to hold and are not stated, as dataset.json would have them."""
        found: dict[str, list[str]] = {}
        for habit in self.habits:
            if not habit.stated:
                found.setdefault(habit.name, []).append(habit.habit)
        return found

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "warning"]

    def to_json(self) -> dict[str, Any]:
        contradicting = [f for f in self.findings if f.kind == "contradiction"]
        return {
            **asdict(self),
            "ok": not self.errors,
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "contradictions": {"cases": len(contradicting), "pixels": sum(f.count for f in contradicting)},
            "findings": [{**asdict(f), "where": [place._asdict() for place in f.where]} for f in self.findings],
            "habits": [{**asdict(h), "strokes": h.strokes._asdict(), "masks": h.masks._asdict()} for h in self.habits],
        }

    def refusal(self) -> str:
        """The first few errors as one message."""
        errors = self.errors
        text = "; ".join(f.message for f in errors[:_SHOWN])
        if len(errors) > _SHOWN:
            text += f"; and {len(errors) - _SHOWN} more errors: see `pclmix check {self.dataset}`"
        return text

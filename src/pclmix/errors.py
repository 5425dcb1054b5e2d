"""What a user is told when something of theirs is wrong: one message, the way out, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PclmixError(Exception):
    """A user's mistake. The text names the file or key, what is wrong with it, and what to do next."""


def require_one_of(key: str, value: object, known: Sequence[str]) -> None:
    """Refuse a word that is not among those known: Python does not look at types when it runs."""
    if value not in known:
        raise PclmixError(f"{key}={value!r}: choose {', '.join(known[:-1])} or {known[-1]}")


def require_names(key: str, value: object) -> None:
    """Refuse one name where several may be given: it would be taken letter by letter."""
    if isinstance(value, str):
        raise PclmixError(f"{key}={value!r}: a list of names is needed, such as [{value!r}]")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ` Did you mean 'labels'?`, or the empty string when nothing is close."""
    by_lower = {text.lower(): text for text in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""

"""What a user is told when something of theirs is wrong: one message, the way out, exit code 2."""

from __future__ import annotations

import difflib
import importlib
import pickle
from collections.abc import Iterable, Sequence
from typing import Any


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


def need_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a package that only an extra of pclmix installs; where it is missing, name the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise PclmixError(
            f"{purpose} needs the package {missing}, which the extra '{extra}' installs: "
            f"pip install '.[{extra}]' in a clone of pclmix, or pip install {missing}"
        ) from error


def load_failure(error: Exception) -> str:
    """Why torch.load failed, in one line, without PyTorch's advice to run the code that a refused file holds."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds objects other than tensors, which could run code"
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ` Did you mean 'labels'?`, or the empty string when nothing is close."""
    by_lower = {text.lower(): text for text in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""

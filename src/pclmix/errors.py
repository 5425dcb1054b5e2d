"""Errors of the user's input: one message with a way to fix it, exit code 2. Checks of what files hold."""

from __future__ import annotations

import difflib
import importlib
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
MAX_YAML = 1 << 20  #: letters of a YAML file
_MOST, _DEEPEST = 20_000, 50  # elements and levels of one: aliases make much of a short text
_LONGEST = 1000  # letters of one line of a message; it may quote a file
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class PclmixError(Exception):
    """Invalid input. The message names the file or key, the problem, and how to fix it.

    Control characters are escaped, since terminals execute them. Long lines are cut in the middle: the file is named at
    the beginning, the way out at the end.
    """

    def __init__(self, message: str = "") -> None:
        lines = (_cut(line) for line in str(message).translate(_CONTROL).split("\n"))
        super().__init__("\n".join(lines))


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST * 2 // 3]} ... {line[-_LONGEST // 3 + 5 :]}"


def require_one_of(key: str, value: object, known: Sequence[str]) -> None:
    """Refuse an unknown value: Python does not check types at run time."""
    if value not in known:
        raise PclmixError(f"{key}={value!r}: choose {', '.join(known[:-1])} or {known[-1]}")


def require_names(key: str, value: object) -> None:
    """Refuse a string in place of a list of names: it would be iterated letter by letter."""
    if isinstance(value, str):
        raise PclmixError(f"{key}={value!r}: a list of names is needed, such as [{value!r}]")


def need_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra; if it is missing, the error names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise PclmixError(f"{purpose} needs the package {missing}: {install_hint(extra, missing)}") from error


def install_hint(extra: str, missing: str) -> str:
    """How to install an extra: from a clone, or its packages by name, since a wheel may come from anywhere."""
    from importlib import metadata  # slow to import, and only needed here

    try:
        requirements = metadata.requires("pclmix") or []
    except metadata.PackageNotFoundError:  # pclmix-runtime, which has other extras
        return f"pip install {missing}"
    ending = re.compile(rf"""extra == ['"]{extra}['"]$""")
    packages = [re.split(r"[^\w.-]", line)[0] for line in requirements if ending.search(line)]
    by_name = " ".join(packages) or missing
    return f"pip install '.[{extra}]' in a clone of pclmix, or pip install {by_name}"


@contextmanager
def without_warnings() -> Iterator[None]:
    """While a file is read that may be damaged: the error is enough."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load_failure(error: Exception) -> str:
    """Why torch.load failed, in one line, without PyTorch's advice to allow unsafe loading."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds objects other than tensors, which could run code"
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ` Did you mean 'labels'?`, or the empty string when nothing is close."""
    by_lower = {text.lower(): text for text in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""


def checked(kind: type[T], content: Any, where: object) -> T:
    """`content` of the file `where`, which pclmix itself has written, as a dataclass or model."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        said = f"key '{key}': {first['msg']}" if key else first["msg"]
        raise PclmixError(f"{where} is damaged or of another version of pclmix ({said}); repair or remove it") from None


def read_yaml(text: str, where: str, fault: str = "is not valid YAML") -> Any:
    """The content of a YAML text; `where` names the file or key for messages."""
    import yaml

    if len(text) > MAX_YAML:
        raise PclmixError(f"{where} {fault}: it has {len(text)} letters; is it a recipe?")

    try:
        content = yaml.safe_load(text)
    except Exception as error:  # PyYAML raises many types of errors, such as ValueError for a date of month 13
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PclmixError(f"{where} {fault}: {said}") from error
    count, level = 0, [content]
    for _ in range(_DEEPEST):
        count += len(level)
        if count > _MOST:
            raise PclmixError(f"{where} {fault}: it has more than {_MOST} elements")
        level = list(islice(_inside(level), _MOST + 1))
    if level:
        raise PclmixError(f"{where} {fault}: it is nested too deeply")
    return content


def _inside(level: Sequence[Any]) -> Iterator[Any]:
    for item in level:
        if isinstance(item, dict):
            yield from (*item, *item.values())
        elif isinstance(item, list | tuple | set):
            yield from item

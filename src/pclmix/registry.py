"""Registries of named choices: register with a decorator, find by name; errors suggest the nearest name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pclmix.errors import PclmixError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named objects of one kind.

    >>> shapes: Registry[type] = Registry("shape")
    >>> @shapes.register("disc")
    ... class Disc: ...
    >>> shapes.find("disc").__name__
    'Disc'
    >>> shapes.find("disk")
    Traceback (most recent call last):
    pclmix.errors.PclmixError: unknown shape 'disk'. Did you mean 'disc'? Known: disc
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._items[name] = item
            return item

        return add

    def find(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            known = ", ".join(self.names())
            message = f"unknown {self.kind} '{name}'.{nearest(name, self._items)} Known: {known}"
            raise PclmixError(message) from None

    def names(self) -> list[str]:
        return sorted(self._items)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return iter(sorted(self._items.items()))

    def __contains__(self, name: object) -> bool:
        return name in self._items

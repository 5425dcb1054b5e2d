"""What a message of an error may hold, and what is refused of YAML and of pclmix's own files."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest

from pclmix.errors import PclmixError, checked, read_yaml


def test_control_characters_are_escaped() -> None:
    assert str(PclmixError("a\x1b[2J\x07b\n\tc\x9b")) == "a\\x1b[2J\\x07b\n\tc\\x9b"


def test_long_lines_are_cut_in_the_middle() -> None:
    error = PclmixError(f"a.json: {'x' * 5000}; save it again\nsecond line")
    first, second = str(error).split("\n")
    assert len(first) <= 1000
    assert first.startswith("a.json: x")
    assert first.endswith("x; save it again")
    assert second == "second line"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


BOMB = "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in
                 zip("abcdefgh", "bcdefghi", strict=True))])  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [BOMB, "&a [*a]", "[" * 60 + "]" * 60, "[" * 5000, "a: 2001-13-45", "a: " + "9" * 5000, "!!float x", "{[a]: b}",
     "!!bool x", "!!int ''", "x" * (2 << 20), "!!python/object/apply:os.system [ls]"],
    ids=["aliases", "cycle", "levels", "open", "month", "digits", "float", "key", "bool", "int", "long", "object"],
)  # fmt: skip
def test_yaml_is_refused_with_one_short_message(text: str) -> None:
    with pytest.raises(PclmixError, match=r"^here\.yaml\b") as caught:
        read_yaml(text, "here.yaml")
    assert len(str(caught.value)) < 3000


@dataclass(frozen=True)
class Known:
    step: int
    cases: list[str]


@pytest.mark.parametrize(
    ("content", "key"),
    [([], ""), ({"step": "x", "cases": []}, "step"), ({"step": 1, "cases": [2]}, "cases.0"), (None, "")],
)
def test_own_files_are_checked(content: object, key: str) -> None:
    assert checked(Known, {"step": 1, "cases": ["a"]}, "a.json") == Known(1, ["a"])
    with pytest.raises(PclmixError, match=r"^a\.json\b") as caught:
        checked(Known, content, "a.json")
    assert key in str(caught.value)

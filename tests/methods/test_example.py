"""The example of docs/adding-a-method.md, taken from the page, is a method like any other."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from pclmix.methods.base import METHODS, Method

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    """The file of the page as a module, removed afterwards."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    module = types.ModuleType("selftrain")
    monkeypatch.setitem(sys.modules, "selftrain", module)
    monkeypatch.setattr(METHODS, "_items", dict(METHODS._items))
    exec(compile(blocks[0], str(PAGE), "exec"), module.__dict__)
    return METHODS.find("selftrain")


@pytest.mark.parametrize("net", ["unet", "resnet18"])
def test_the_example_fulfils_the_contract(
    net: str,
    example: type[Method],
    contract: Callable[..., Any],
    no_sync: Callable[[], AbstractContextManager[Any]],
) -> None:
    kept = contract("selftrain", example, net)
    kept.describes_itself()
    kept.has_finite_loss_and_gradients_where_they_belong()
    kept.has_the_same_terms_at_every_step()
    kept.is_finite_without_scribbles()
    kept.is_reproducible_and_restores_its_state()
    kept.never_waits_for_the_device(no_sync)
    kept.runs_in_low_precision()
    kept.predicts_with_each_of_its_inference_nets()


def test_files_that_the_page_names_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:methods|losses)/\w+\.py)`", text):
        assert (PAGE.parents[1] / "src" / "pclmix" / name).is_file(), name

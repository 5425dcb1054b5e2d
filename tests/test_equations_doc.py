"""docs/equations.md names functions that a PCLMix step calls, and tests that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from interpreter import interpreted

from pclmix import kernels
from pclmix.data.batch import Batch
from pclmix.methods.base import Task, build_params, sum_terms
from pclmix.methods.pclmix import PCLMix
from pclmix.mixing import MIXERS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py:\w+)`", PAGE)))
#: What a step calls, and what it calls instead where kernels are used.
FUNCTIONS = sorted(set(re.findall(r"`([\w/]+\.py:(?!test_)\w+)`(?:; fused: `([\w/]+\.py:\w+)`)?", PAGE)))
#: Functions that only a step with this mixer calls.
MIXER = {"partial_cross_entropy_soft": "mixup", "MixUp": "mixup", "Cutout": "cutout", "SaliencyMix": "saliency"}


def defined(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def codes(name: str) -> set[CodeType]:
    """The code of a function such as `losses/contrast.py:info_nce`, or of all methods of a class."""
    file, _, attribute = name.partition(":")
    thing = getattr(importlib.import_module(f"pclmix.{file.removesuffix('.py').replace('/', '.')}"), attribute)
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    return {inspect.unwrap(member).__code__ for member in members if inspect.isfunction(member)}


@cache
def called_by_a_step(mixer: str, fused: bool = False) -> frozenset[CodeType]:
    """The code of every Python function that one training step runs, its terms summed as the trainer does.

    `fused`: with the kernels of the losses, in Triton's interpreter where there is no GPU.
    """
    device = "cuda" if fused and torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    small = {"anchors": 16, "queue": 4, "embedding": 8, "swin_width": 24, "mixer": mixer}
    method = PCLMix(Task("resnet10", 1, 3, (32, 32)), build_params(PCLMix, small))  # type: ignore[arg-type]
    method.to(device).train()
    label = torch.randint(-1, 3, (3, 32, 32), device=device)
    batch = Batch(torch.rand(3, 1, 32, 32, device=device), label, torch.arange(3, device=device))
    progress, generator = torch.full((), 0.5, device=device), torch.Generator(device).manual_seed(0)
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        seen.add(frame.f_code)

    others = [operation for operation in kernels.OPERATIONS if operation != "losses" or not fused]
    where = interpreted() if fused and device == "cpu" else nullcontext()
    with kernels.plain(*others), where, torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        sys.setprofile(note)
        try:
            sum_terms(method.step(batch, progress, generator))
        finally:
            sys.setprofile(None)
    return frozenset(seen)


@pytest.mark.parametrize("name", NAMED)
def test_named_functions_and_tests_exist(name: str) -> None:
    file, _, attribute = name.partition(":")
    base = ROOT / ("tests" if attribute.startswith("test_") else "src/pclmix")
    assert attribute in defined(base / file)


@pytest.mark.parametrize("name", [plain for plain, _ in FUNCTIONS])
def test_step_calls_named_functions(name: str) -> None:
    assert codes(name) & called_by_a_step(MIXER.get(name.partition(":")[2], "cutmix"))


@pytest.mark.parametrize(("plain", "fused"), [pair for pair in FUNCTIONS if pair[0].partition(":")[2] not in MIXER])
def test_step_with_kernels_calls_named_functions(plain: str, fused: str) -> None:
    pytest.importorskip("triton")
    called = called_by_a_step("cutmix", fused=True)
    assert codes(fused or plain) & called
    if fused:
        assert not codes(plain) & called


def test_finds_functions_that_no_step_calls() -> None:
    assert not codes("methods/em.py:normalised_entropy") & called_by_a_step("cutmix")
    assert set(MIXER.values()) | {"cutmix"} == set(MIXERS.names())
    assert any(fused for _, fused in FUNCTIONS)


def test_every_equation_has_a_row() -> None:
    cells = re.findall(r"^\| ([\d, ]+)[^|]*\|", PAGE, flags=re.MULTILINE)
    assert {int(n) for cell in cells for n in re.findall(r"\d+", cell)} == set(range(1, 14))
    rows = re.findall(r"^\| (\d+)[^|]*\|[^|]*\|([^|]*)\|", PAGE.split("## Mixing")[0], flags=re.MULTILINE)
    assert {int(number) for number, function in rows if ":" in function} >= {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13}

"""Scores of predictions: Dice, HD95, ASSD and volumes by case and class, summaries, paired intervals."""

import sys
from types import ModuleType
from typing import Any

from pclmix.evaluate.run import evaluate
from pclmix.evaluate.summary import Statistic, Summary, read_summary

__all__ = ["Statistic", "Summary", "evaluate", "read_summary"]


class _Package(ModuleType):
    """This package, which can be called: importing it makes `pclmix.evaluate` the package, so it must be both."""

    def __call__(self, *arguments: Any, **options: Any) -> Summary:
        return evaluate(*arguments, **options)


sys.modules[__name__].__class__ = _Package

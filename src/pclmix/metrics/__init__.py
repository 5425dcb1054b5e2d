"""Dice, HD95 and ASSD of arrays; scores of folders of predictions, their summary and comparison."""

from pclmix.metrics.functional import assd, dice, hd95
from pclmix.metrics.run import evaluate
from pclmix.metrics.summary import Statistic, Summary, read_summary

__all__ = ["Statistic", "Summary", "assd", "dice", "evaluate", "hd95", "read_summary"]

"""Scores of predictions: Dice, HD95, ASSD and volumes by case and class, summaries, paired intervals."""

from pclmix.evaluate.run import evaluate
from pclmix.evaluate.summary import Statistic, Summary, read_summary

__all__ = ["Statistic", "Summary", "evaluate", "read_summary"]

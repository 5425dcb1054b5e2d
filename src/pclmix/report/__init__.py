"""Comparison of runs: tables, figures, pages."""

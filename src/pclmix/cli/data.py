"""Commands that make, check and split datasets."""

from __future__ import annotations

"""What the addresses of the server work on: the books of one dataset."""

from __future__ import annotations

from pathlib import Path

from pclmix.web.cases import CaseBook
from pclmix.web.events import Bus
from pclmix.web.jobs import Jobs
from pclmix.web.packing import Limits
from pclmix.web.predictions import PredictionBook
from pclmix.web.strokes import StrokeBook
from pclmix.web.workspace import Workspace


class Bench:
    """The cases, strokes, predictions and jobs of one dataset, and the bus that tells open pages of changes."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.workspace = Workspace(root)
        self.strokes = StrokeBook(self.workspace)
        self.cases = CaseBook(self.workspace)
        self.predictions = PredictionBook(self.workspace)
        self.jobs = Jobs(self.workspace)
        self.bus = Bus()
        self.limits = limits

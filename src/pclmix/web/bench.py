"""State shared by all routes of a server, and server-sent events for open pages."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from pclmix.web.archives import Limits
from pclmix.web.cases import CaseIndex
from pclmix.web.jobs import Jobs
from pclmix.web.results import PredictionStore
from pclmix.web.strokes import StrokeStore
from pclmix.web.workspace import Workspace

_EVERY = 0.4  # seconds between two polls of the job
_SILENCE = 15.0  # seconds after which a comment keeps the connection alive


class Bus:
    """A bounded, numbered message queue; each listener continues from its own position."""

    def __init__(self) -> None:
        self._messages: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=500)
        self._guard = threading.Lock()
        self.last = 0

    def publish(self, kind: str, **content: Any) -> None:
        with self._guard:
            self._messages.append((self.last + 1, kind, content))
            self.last += 1

    def since(self, number: int) -> list[tuple[int, str, dict[str, Any]]]:
        return [message for message in list(self._messages) if message[0] > number]


async def stream(bus: Bus, jobs: Jobs) -> AsyncIterator[str]:
    """Events for one page, starting now: the state of the job first and on each change, then messages."""
    seen, before, silence = bus.last, "", 0.0
    yield "retry: 1000\n\n"
    while True:
        state = json.dumps(await run_in_threadpool(jobs.state))
        messages = bus.since(seen)
        if state != before:
            yield f"event: job\ndata: {state}\n\n"
        for number, kind, content in messages:
            seen = number
            yield f"event: {kind}\ndata: {json.dumps(content)}\n\n"
        silence = 0.0 if messages or state != before else silence + _EVERY
        before = state
        if silence > _SILENCE:
            silence = 0.0
            yield ": keep-alive\n\n"
        await asyncio.sleep(_EVERY)


class Bench:
    """Cases, strokes, predictions and jobs of one dataset, and the bus that notifies open pages of changes."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.workspace = Workspace(root)
        self.strokes = StrokeStore(self.workspace)
        self.cases = CaseIndex(self.workspace)
        self.predictions = PredictionStore(self.workspace)
        self.jobs = Jobs(self.workspace)
        self.bus = Bus()
        self.limits = limits

"""Server-sent events: how the job goes, and that strokes or cases changed, to every open page."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool

from pclmix.web.jobs import Jobs

_EVERY = 0.4  # seconds between looks at the job
_SILENCE = 15.0  # after which a comment keeps the connection alive


class Bus:
    """The last messages, numbered; whoever listens reads on from where it was."""

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
    """Events for one page, from now on; the job's state comes first and then whenever it changes."""
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
            yield ": still here\n\n"
        await asyncio.sleep(_EVERY)

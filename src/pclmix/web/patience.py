"""Connections that stall are closed: uvicorn waits for ever for headers, a body, or a client that reads nothing."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits on how long a client may keep it waiting."""

    head_seconds = 15.0  #: for a request line with its headers, also between the requests of one connection
    stall_seconds = 60.0  #: without a byte of a body that is due, or of an answer that is read
    body_rate = 1024  #: bytes a second that a body needs on average, once `stall_seconds` have passed
    every = 1.0  #: seconds between two looks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._waiting_since = self._moved = now
        self._received, self._buffered = 0, 0
        self._look = self.loop.call_later(self.every, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = self.loop.time()
        self._received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waiting_since = self._moved = self.loop.time()
        self._received = 0

    def _check(self) -> None:
        if self._is_stalled(self.loop.time()):
            self.transport.abort()  # close() would wait for a client that reads nothing
            return
        self._look = self.loop.call_later(self.every, self._check)

    def _is_stalled(self, now: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        if waiting and waiting == self._buffered:
            return now - self._moved > self.stall_seconds
        if waiting or self._buffered:
            self._buffered, self._moved = waiting, now
        if self.cycle is None or self.cycle.response_complete:
            return now - self._waiting_since > self.head_seconds
        if self.conn.their_state is not h11.SEND_BODY or self.flow.read_paused:
            self._moved = now  # it is this server's turn
            return False
        due = now - self._waiting_since - self.stall_seconds
        return now - self._moved > self.stall_seconds or self._received < due * self.body_rate

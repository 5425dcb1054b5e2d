"""Rendezvous of `--devices N` on one computer: a store that listens on the loopback interface only.

torchrun's own store listens on all interfaces and has neither encryption nor password.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "pclmix-loopback"
_HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """One agent, which has nobody to wait for; its ranks use the same store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((_HOST, 0))
            port = listener.getsockname()[1]
            self._store = TCPStore(
                _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        place = RendezvousStoreInfo(_HOST, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> Loopback:
    return Loopback(parameters.run_id)


def register() -> None:
    """Make BACKEND known to torch's launcher."""
    rendezvous_handler_registry.register(BACKEND, _create)

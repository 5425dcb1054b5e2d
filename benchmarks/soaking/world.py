"""The server, its small disk, and what the clients share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from soaking.ledger import Ledger, Record

MOST = 200_000  #: requests in all
MARK = "PCLMIX_SOAK"  #: in the environment of every process started here


@dataclass
class Server:
    """`pclmix serve` on the dataset, started again after each kill."""

    root: Path
    work: Path
    environment: dict[str, str]
    process: subprocess.Popen[str] | None = None
    address: str = ""
    born: float = 0.0

    def start(self) -> None:
        command = [sys.executable, "-m", "pclmix", "serve", str(self.root), "--no-browser", "--port", "0"]
        with (self.work / "server.txt").open("a") as said:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=said, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("workbench: "):
            raise SystemExit(f"the server did not start; see {self.work / 'server.txt'}")
        self.address, self.born = line.removeprefix("workbench: ").strip().rstrip("/"), time.monotonic()

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def size(self) -> tuple[float, int]:
        """Memory in MiB and number of open files."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return memory / 1024, len(os.listdir(f"/proc/{self.process.pid}/fd"))


@dataclass
class World:
    """What clients share: the server, when it is to stop, whether they may send."""

    server: Server
    record: Record
    ends: float
    ledgers: dict[str, Ledger]
    kills: int = 0
    full: bool = False
    slowest: float = 0.0
    freed: float = 0.0
    last_full: float = -1e9
    uploads: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    _open: threading.Event = field(default_factory=threading.Event)
    _active: int = 0
    _sent: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _still: threading.Lock = field(default_factory=threading.Lock)
    _local: threading.local = field(default_factory=threading.local)

    def goes_on(self) -> bool:
        return time.monotonic() < self.ends and self._sent < MOST

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the world as it is: no audit begins before this ends."""
        while True:
            self._open.wait()
            with self._guard:
                if self._open.is_set():
                    self._active += 1
                    self._local.kills = self.kills
                    break
        try:
            yield
        finally:
            with self._guard:
                self._active -= 1

    @contextmanager
    def quiet(self, kill: bool = False) -> Iterator[None]:
        """No request is under way, and none begins. With `kill` the server is killed while some are under way."""
        with self._still:  # one at a time
            with self._guard:
                self._open.clear()
                self.kills += kill
            if kill:
                self.server.end(signal.SIGKILL)
            waiting = time.monotonic() + 130
            while self._active and time.monotonic() < waiting:
                time.sleep(0.02)
            if self._active:
                self.record.find("requests were still under way after 130 s")
            try:
                yield
            finally:
                self._open.set()

    def call(self, method: str, path: str, shown: str = "", **content: Any) -> httpx.Response | None:
        """One request; None where the server was killed meanwhile. Call it within `turn`."""
        if not hasattr(self._local, "client"):
            # The server closes a connection that is idle for 15 s; a request sent at that moment has no answer.
            limits = httpx.Limits(keepalive_expiry=2)
            self._local.client = httpx.Client(headers={"x-pclmix": "1"}, timeout=120, limits=limits)
        self._sent, shown = self._sent + 1, shown or path
        began = time.monotonic()
        try:
            answer: httpx.Response = self._local.client.request(method, self.server.address + path, **content)
        except httpx.TransportError as error:
            if self.kills == self._local.kills:
                self.record.find(f"{method} {shown}: no answer ({type(error).__name__}: {error})")
            self.record.count(f"{method} {shown}: lost in a kill")
            return None
        self.record.count(f"{method} {shown}: {answer.status_code}")
        self.slowest = max(self.slowest, time.monotonic() - began)
        status = answer.status_code
        if status >= 500 and not (status == 507 and (self.full or time.monotonic() < self.freed + 5)):
            self.record.find(f"{method} {shown}: {status} {answer.text[:200]}")
        return answer


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[str | None]:
    """Mount an ext4 image, else a tmpfs, of `size` MiB; gives its kind, or None where mounting is not permitted."""
    image = folder.with_suffix(".img")
    folder.mkdir()
    if not size:
        yield None
        return
    with image.open("wb") as file:
        file.truncate(size << 20)
    ways = {
        "ext4": [["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(folder)]],
        "tmpfs": [["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)]],
    }
    kind = next((kind for kind, commands in ways.items() if all(map(works, commands))), None)
    try:
        yield kind
    finally:
        if kind is not None:
            for _ in range(50):
                if works(["umount", str(folder)]):
                    break
                time.sleep(0.2)
        image.unlink()


def works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def fill(disk: Path) -> None:
    """Leave no free byte on the disk."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        with suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, free - (1 << 20)))
        file.seek(0, os.SEEK_END)
        with suppress(OSError):
            while file.write(b"\0" * 4096):
                pass


def worker_runs(root: Path) -> bool:
    return any("pclmix.web.worker" in command for command in marked(str(root)).values())


def marked(value: str) -> dict[int, str]:
    """Processes started here, with their commands."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: command for pid, command in found.items() if command}  # a zombie has none


def files_in(root: Path) -> dict[str, int]:
    """Number of files in each part of .pclmix."""
    internal = root / ".pclmix"
    return dict(Counter(path.relative_to(internal).parts[0] for path in internal.rglob("*") if path.is_file()))

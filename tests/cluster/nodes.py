"""Two real Ray nodes on this host, each with its own working folder and cache."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
RAY = (sys.executable, "-m", "ray.scripts.scripts")


def private_mounts() -> bool:
    """Whether this user may give a process a mount namespace of its own."""
    done = (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    )
    return done is not None and done.returncode == 0


@dataclass
class TwoNodes:
    """The head, which drivers run on, and a second node; `env` is what a driver's process needs."""

    root: Path
    temp: Path  #: of Ray; short, since the names of sockets are limited
    env: dict[str, str]
    port: int
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.2:{self.port}"

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    @property
    def hidden(self) -> Path:
        """Below it the second node sees an empty folder, where namespaces are permitted."""
        return self.root / "hidden"

    def start(self, name: str) -> None:
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        env = {**self.env, "PCLMIX_CACHE": str(folder / "cache")}
        where = ["--head", f"--port={self.port}", "--node-ip-address=127.0.0.2", "--include-dashboard=false"]
        if name != "head":
            where = [f"--address={self.address}", "--node-ip-address=127.0.0.3"]
        command = [*RAY, "start", "--block", *where, "--num-cpus=1", "--object-store-memory=90000000"]
        command += [f"--temp-dir={self.temp}"] if name == "head" else []
        if name != "head" and private_mounts():
            # In a mount namespace of its own, an empty folder lies over `hidden`.
            script = f'mount -t tmpfs none "{self.hidden}" && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", script, "sh", *command]
        log = (self.root / f"{name}.log").open("ab")
        self.started[name] = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def wait(self, count: int = 2, seconds: float = 120.0) -> None:
        """Until so many nodes are alive, asked from a process of its own."""
        program = (
            f"import ray, time\nray.init(address='{self.address}', logging_level=50, log_to_driver=False)\n"
            f"while sum(node['Alive'] for node in ray.nodes()) != {count}: time.sleep(0.2)"
        )
        subprocess.run([sys.executable, "-c", program], env=self.env, capture_output=True, check=True, timeout=seconds)

    def wait_for_port(self, seconds: float = 60.0) -> None:
        """Until the head answers."""
        until = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.2", self.port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def pids(self, name: str) -> list[int]:
        """The processes of a node: all those of its session."""
        leader = self.started[name].pid
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # one that has just ended
                state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == leader and state != "Z":
                    found.append(int(folder.name))
        return found

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a node, as in a power failure."""
        while found := self.pids(name):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.started.pop(name).wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

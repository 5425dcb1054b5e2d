"""`--cluster local`: a Ray that listens on loopback only and ends with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
LISTEN = "0A"
#: 127.0.0.1 as /proc/net/tcp has it, mapped into IPv6 as /proc/net/tcp6 has it, and ::1.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
PROGRAM = """
import sys
from pclmix.cluster.engine import Resources, connect
def work():
    return 7
with connect("local") as cluster:
    print(cluster.get(cluster.submit(work, resources=Resources(1))), flush=True)
    sys.stdin.readline()
"""


def session(leader: int) -> list[Path]:
    """The processes of a session, as folders of /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and state != "Z":
                found.append(folder)
    return found


def listening(processes: list[Path]) -> dict[str, str]:
    """The local addresses that processes listen on, by socket."""
    owned = set()
    for folder in processes:
        with suppress(OSError):
            owned |= {os.readlink(link) for link in (folder / "fd").iterdir()}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in owned:
                found[fields[9]] = fields[1].partition(":")[0]
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_local_cluster_listens_on_loopback_and_ends_with_its_command() -> None:
    pytest.importorskip("ray", reason="needs the extra 'cluster'")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", PROGRAM]
    driver = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "7\n"
        processes = session(driver.pid)
        assert any("gcs_server" in (folder / "cmdline").read_text() for folder in processes)
        addresses = listening(processes)
        assert len(addresses) >= 3
        assert set(addresses.values()) <= LOOPBACK
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.wait(timeout=60) == 0
        until = time.monotonic() + 30
        while session(driver.pid) and time.monotonic() < until:
            time.sleep(0.2)
        assert not session(driver.pid)
    finally:
        for folder in session(driver.pid):
            with suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)

"""A cluster of two nodes for the tests of a module, and a driver for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nodes import SOURCE, TwoNodes, free_port


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    pytest.importorskip("ray", reason="needs the extra 'cluster'")
    if not sys.platform.startswith("linux"):
        pytest.skip("two nodes on one host need Linux")
    root = Path(tmp_path_factory.mktemp("nodes"))
    token = root / "token"
    token.write_text(uuid.uuid4().hex)
    env = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "10000",
        "RAY_health_check_failure_threshold": "5",
    }
    env.pop("RAY_ADDRESS", None)
    temp = Path(tempfile.mkdtemp(prefix="px-", dir="/tmp"))
    nodes = TwoNodes(root, temp, env, free_port())
    nodes.shared.mkdir()
    nodes.hidden.mkdir()
    try:
        nodes.start("head")
        nodes.wait_for_port()
        nodes.start("second")
        nodes.wait()
        yield nodes
    finally:
        for name in list(nodes.started):
            nodes.kill(name)
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture
def pclmix(two_nodes: TwoNodes, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """`pclmix ARGUMENTS` as a driver on the head node, in a working folder of its own."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        env = {**two_nodes.env, "PCLMIX_CACHE": str(tmp_path / "driver-cache")}
        return subprocess.Popen(
            [sys.executable, "-m", "pclmix", *map(str, arguments)],
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Where the tests run in the background, Ctrl-C would be ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return start

"""Resources, addresses and options, checked before connecting."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pclmix import cli
from pclmix.cluster import engine
from pclmix.cluster.engine import Cluster, ClusterOptions, Node, Resources, connect, own_cluster
from pclmix.errors import PclmixError


def nodes(*sizes: tuple[float, float]) -> Any:
    """As ray.nodes() gives them: cores and GPUs of each."""

    class Fake:
        @staticmethod
        def nodes() -> list[dict[str, Any]]:
            return [
                {
                    "NodeID": str(k),
                    "NodeManagerHostname": f"host{k}",
                    "NodeManagerAddress": f"10.0.0.{k}",
                    "Resources": {"CPU": cores, **({"GPU": gpus} if gpus else {})},
                    "Alive": True,
                }
                for k, (cores, gpus) in enumerate(sizes)
            ]

    return Fake


@pytest.mark.parametrize(
    ("cores", "gpus", "slots"), [(1, 0.0, 8), (3, 0.0, 2), (1, 1.0, 2), (1, 0.25, 8), (1, 0.1, 8), (1, 3.0, 0)]
)
def test_slots_of_a_node(cores: int, gpus: float, slots: int) -> None:
    assert Node("1", "host", "10.0.0.1", 8.0, 2.0).slots(Resources(cores, gpus)) == slots


def test_runs_use_a_gpu_if_available() -> None:
    with_gpus, without = Cluster(nodes((8, 0), (8, 4))), Cluster(nodes((8, 0)))
    assert with_gpus.resources(ClusterOptions("auto"), "auto") == Resources(1, 1.0)
    assert with_gpus.resources(ClusterOptions("auto"), "auto", 4) == Resources(1, 4.0)
    assert with_gpus.resources(ClusterOptions("auto", 2, 0.5), "cuda") == Resources(2, 0.5)
    assert with_gpus.resources(ClusterOptions("auto"), "cpu") == Resources(1, 0.0)
    assert without.resources(ClusterOptions("auto"), "auto") == Resources(1, 0.0)


@pytest.mark.parametrize(
    ("options", "device", "named"),
    [
        (ClusterOptions("auto"), "cuda", "--device cuda"),
        (ClusterOptions("auto", gpus=1), "cpu", "--gpus 1"),
        (ClusterOptions("auto", cores=9), "auto", "host0 (10.0.0.0)"),
        (ClusterOptions("auto", gpus=2), "auto", "2 GPU(s)"),
    ],
)
def test_refuses_resources_that_no_node_has(options: ClusterOptions, device: str, named: str) -> None:
    with pytest.raises(PclmixError) as caught:
        Cluster(nodes((8, 0))).resources(options, device)
    assert named in str(caught.value)


@pytest.mark.parametrize("given", [{"cores": 0}, {"gpus": 1.5, "address": "auto"}, {"gpus": 1.0}, {"gpus": -1.0}])
def test_refuses_invalid_options(given: dict[str, Any]) -> None:
    with pytest.raises(PclmixError):
        ClusterOptions(**given)


@pytest.mark.parametrize("address", ["", "host", "host:", ":6379", "host:port", "ray://host:10001", "http://h:1"])
def test_an_address_is_never_guessed(address: str) -> None:
    with pytest.raises(PclmixError, match="--cluster"), connect(address):
        pass


def test_unreachable_address_is_refused_at_once(phantom_dataset: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    pytest.importorskip("ray", reason="needs the extra 'cluster'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening
        address = f"127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        result = run("crossval", phantom_dataset, "--out", tmp_path / "cv", "--recipe", "tiny", "--cluster", address)
        assert time.monotonic() - began < 30  # Ray alone takes minutes
    assert result.code == 2
    assert address in result.err
    assert not (tmp_path / "cv").exists()
    with pytest.raises(PclmixError, match=r"127\.0\.0\.1:99999"), connect("127.0.0.1:99999"):
        pass


def test_every_local_cluster_of_a_process_has_its_own_token() -> None:
    """Ray itself would keep the first one, or none if it was imported before."""
    pytest.importorskip("ray", reason="needs the extra 'cluster'")
    from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

    found = []
    for _ in range(2):
        with engine._environment("local"):
            engine._reread_settings()
            found.append(AuthenticationTokenLoader.instance().get_token_for_http_header())
            assert os.environ["RAY_AUTH_TOKEN"] in found[-1]["authorization"]
            assert get_authentication_mode() == AuthenticationMode.TOKEN
    assert found[0] != found[1]


def test_sigterm_keeps_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would print a stack and abort the process; ours lets runs save first."""
    ray = pytest.importorskip("ray", reason="needs the extra 'cluster'")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connect("local"):
        assert signal.getsignal(signal.SIGTERM) == before


def test_auto_uses_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert own_cluster() == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(PclmixError, match="RAY_ADDRESS"):
        own_cluster()


def test_auto_ignores_clusters_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own `auto` joins any Ray of the host."""
    pytest.importorskip("ray", reason="needs the extra 'cluster'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(PclmixError, match="--cluster auto"):
        own_cluster()
    noted = tmp_path / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text("127.0.0.1:6379\n")
    assert own_cluster() == "127.0.0.1:6379"
    noted.write_text("nothing like an address")
    with pytest.raises(PclmixError, match="--cluster auto"):
        own_cluster()
    owner = noted.stat().st_uid
    if owner == 0:  # the administrator's clusters are trusted
        monkeypatch.setattr("os.getuid", lambda: 1000)
        os.chown(noted, 1001, -1)
    else:
        monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(PclmixError, match="ray_current_cluster"):
        own_cluster()


def test_without_ray_the_message_names_the_extra(
    phantom_dataset: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")  # set by connecting: restored after the test
    result = run("crossval", phantom_dataset, "--out", tmp_path / "cv", "--recipe", "tiny", "--cluster", "local")
    assert result.code == 2
    assert "'.[cluster]'" in result.err
    assert "ray" in result.err


def test_ray_is_imported_for_clusters_only(phantom_dataset: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pclmix.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('ray' in sys.modules, file=sys.stderr)"
    )
    words = ["crossval", phantom_dataset, "--out", tmp_path / "cv", "--folds", "1", "--method", "pce"]
    words += ["--recipe", "tiny", "--iterations", "1", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, check=True)
    assert (tmp_path / "cv" / "fold1" / "evaluation.json").is_file()
    assert done.stderr.splitlines()[-1] == "False"


def test_sigterm_exits_with_143_although_ray_raises_an_exit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> None:
        with suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        raise SystemExit(1)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "app", stopped)
    monkeypatch.setattr(cli, "_received", [])
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 143

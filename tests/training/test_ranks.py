"""Two processes train as one: the same weights, queue and statistics, the recipe's batch, an exact resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, open_store
from pclmix.errors import PclmixError
from pclmix.training.checkpoint import LAST, load_checkpoint
from pclmix.training.feed import Feed
from pclmix.training.launch import launch
from pclmix.training.parallel import LOST
from pclmix.training.request import TrainRequest

WORKER = Path(__file__).with_name("engine_worker.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TWO_RANKS = ("--recipe", "tiny", "--device", "cpu")
FOUR = ("engine.iterations=4", "engine.save_every=2")
SHARED = ("gradients", "weights", "batchnorm", "queue")
Launched = tuple[Path, list[list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def launched(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """`pclmix train` under torchrun: the run, and the state of each rank after each step."""
    folder = tmp_path_factory.mktemp("launched")
    run = folder / "run"
    done = subprocess.run(
        [*TORCHRUN, str(WORKER), "train", str(phantom), "--out", str(run), *TWO_RANKS, *FOUR],
        env=os.environ | {"TRACE": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finished") == 1, "rank 0 alone speaks"
    return run, [lines(folder / f"{rank}.jsonl") for rank in (0, 1)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ranks_have_equal_state(launched: Launched) -> None:
    _, (first, second) = launched
    assert [line["step"] for line in first] == [0, 1, 2, 3]
    for one, two in zip(first, second, strict=True):
        for what in SHARED:
            assert one[what] == two[what], f"{what} after step {one['step']}"
        assert one["loss"] != two["loss"]  # each had its own images
        assert one["prototypes"] > 0
        assert one["batchnorm_layers"] > 0
    for what in SHARED:
        assert len({line[what] for line in first}) == 4, f"{what} never changed"


def test_ranks_share_the_batch_of_the_recipe(phantom: Path, launched: Launched) -> None:
    config = load_config("tiny")
    dataset = Dataset.open(phantom)
    store = open_store(dataset, dataset.cases, Settings(config.data.size))
    single = Feed(store, config.engine.batch, config.seed, torch.device("cpu"))
    for one, two in zip(*launched[1], strict=True):
        assert [*one["index"], *two["index"]] == single.places(one["step"]).tolist()
        assert len(one["index"]) == len(two["index"]) == config.engine.batch // 2


def start_two(spawn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Two processes with the environment that torchrun gives; the exit code of each and its result or error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = options.pop("environment", {})
    started = []
    for rank in ("0", "1"):
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        torchrun |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **given}
        started.append(spawn(*args, **options, environment=torchrun))
    for process, _ in started:
        process.join(timeout=300)
    answers = [json.loads(answer.read_text()) if answer.is_file() else None for _, answer in started]
    return [(process.exitcode, answer) for (process, _), answer in zip(started, answers, strict=True)]


def test_ctrl_c_on_one_rank_stops_both_and_the_resume_is_exact(
    phantom: Path,
    launched: Launched,
    tmp_path: Path,
    spawn: Callable[..., Any],
    train: Callable[..., Any],
    same_run: Callable[[Path, Path], None],
) -> None:
    run = tmp_path / "run"
    interrupted = {"TRACE": str(tmp_path), "INTERRUPT": "1 2"}
    assert start_two(spawn, phantom, run, *FOUR, environment=interrupted) == [(0, False), (0, True)]
    assert load_checkpoint(run / LAST).step == 3
    with pytest.raises(PclmixError, match="--devices 2"):
        train(phantom, run, recipe=None, resume=True)
    assert start_two(spawn, phantom, run, recipe=None, resume=True) == [(0, True), (0, True)]
    same_run(launched[0], run)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_stops_silently_if_its_peer_is_killed(
    rank: int,
    phantom: Path,
    launched: Launched,
    tmp_path: Path,
    spawn: Callable[..., Any],
    same_run: Callable[[Path, Path], None],
) -> None:
    run = tmp_path / "run"
    killed = {"TRACE": str(tmp_path), "KILL": f"{rank} 2"}
    ended = start_two(spawn, phantom, run, *FOUR, environment=killed)
    assert ended[rank] == (-signal.SIGKILL, None)
    assert ended[1 - rank] == (LOST, None), "its launcher reports the one that was killed"
    assert start_two(spawn, phantom, run, recipe=None, resume=True) == [(0, True), (0, True)]
    same_run(launched[0], run)


def test_nan_on_one_rank_stops_both(phantom: Path, tmp_path: Path, spawn: Callable[..., Any]) -> None:
    run = tmp_path / "run"
    first, second = start_two(spawn, phantom, run, *FOUR, method="diverging")
    assert re.search(r"step 3\b.*\bpoison\b", first[1])
    assert second == (0, True)  # rank 0 reports the error and sets the exit code
    assert load_checkpoint(run / LAST).step == 2


@pytest.mark.parametrize("bad", ["dataset", "setting"])
def test_only_rank_0_reports_invalid_input(phantom: Path, tmp_path: Path, spawn: Callable[..., Any], bad: str) -> None:
    dataset = tmp_path / "nowhere" if bad == "dataset" else phantom
    overrides = ["optim.lrr=1"] if bad == "setting" else []
    first, second = start_two(spawn, dataset, tmp_path / "run", *overrides)
    assert ("nowhere" if bad == "dataset" else "optim.lrr") in first[1]
    assert second == (LOST, None)


STILL = ("augment.quarter_turns=0", "augment.rotate=0", "engine.iterations=5", "engine.save_every=5")


def test_two_processes_equal_one(phantom: Path, tmp_path: Path, spawn: Callable[..., Any]) -> None:
    """Partial cross-entropy without augmentation, whose denominator is reduced over ranks: losses, weights, statistics.

    Both ranks have another number of scribbled pixels. In float64, so that nothing but a real difference shows.
    """
    run, options = tmp_path / "one", {"method": "pce", "environment": {"DOUBLE": "1"}}
    alone, _ = spawn(phantom, run, *STILL, **options)
    alone.join()
    assert start_two(spawn, phantom, tmp_path / "two", *STILL, **options) == [(0, True), (0, True)]
    one, two = (load_checkpoint(tmp_path / name / LAST) for name in ("one", "two"))
    assert one.method["net.encoder.conv1.weight"].dtype == torch.float64
    for name, tensor in one.method.items():
        torch.testing.assert_close(two.method[name], tensor, rtol=1e-7, atol=1e-9)
    first, second = (lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [line["loss"] for line in second] == pytest.approx([line["loss"] for line in first], rel=1e-6)
    assert len(first) == 5


def children(pid: int) -> dict[str, int]:
    """Process numbers by rank of the ranks that a launcher started."""
    found = {}
    for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environment = Path(f"/proc/{text}/environ").read_bytes().split(b"\0")
        found |= {line[5:].decode(): int(text) for line in environment if line.startswith(b"RANK=")}
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks in /proc, which only Linux has")
def test_devices_starts_ranks_and_reports_a_killed_one(
    phantom: Path, launched: Launched, tmp_path: Path, same_run: Callable[[Path, Path], None]
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "pclmix", "train", str(phantom), "--out", str(run), "--devices", "2"]
    process = subprocess.Popen([*command, *TWO_RANKS, *FOUR], stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 300
    while not (run / LAST).is_file():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)
    os.kill(children(process.pid)["1"], signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert "rank 1" in said
    assert "SIGKILL" in said
    assert f"pclmix train {phantom} --out {run} --resume --device cpu --devices 2" in said
    again = subprocess.run([*command, "--resume", "--device", "cpu"], capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    same_run(launched[0], run)


def test_devices_with_an_older_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher has no time limit for ranks that are asked to stop."""
    started: dict[str, Any] = {}

    def config(*, min_nodes: int, max_nodes: int, nproc_per_node: int, run_id: str, max_restarts: int,
               rdzv_backend: str, rdzv_endpoint: str, local_addr: str) -> None:  # fmt: skip
        started.update(processes=nproc_per_node, address=local_addr)

    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", config)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda config, command: lambda *words: None)
    assert launch(TrainRequest(tmp_path / "data", tmp_path / "run", device="cpu", devices=2))
    assert started == {"processes": 2, "address": "localhost"}


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="reads /proc/net, which only Linux has")
def test_devices_listen_on_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own store listens on all interfaces, without a password."""
    found: dict[str, Any] = {}

    def start(config: Any, _: str) -> Callable[..., None]:
        handler = rendezvous_handler_registry.create_handler(
            RendezvousParameters(config.rdzv_backend, config.rdzv_endpoint, config.run_id, 1, 1, config.local_addr)
        )
        place = handler.next_rendezvous().bootstrap_store_info
        client = TCPStore(place.master_addr, place.master_port, is_master=False)  # as each rank connects
        client.set("word", "value")
        sockets = [
            line.split()[1:4:2]
            for table in ("tcp", "tcp6")
            if (file := Path(f"/proc/net/{table}")).is_file()
            for line in file.read_text().splitlines()[1:]
        ]
        found["addresses"] = {
            address.partition(":")[0]
            for address, state in sockets
            if state == "0A" and int(address.partition(":")[2], 16) == place.master_port
        }
        found["gloo"] = os.environ["GLOO_SOCKET_IFNAME"]
        return lambda *_: None

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", start)
    assert launch(TrainRequest(tmp_path / "data", tmp_path / "run", device="cpu", devices=2))
    assert found == {"addresses": {"0100007F"}, "gloo": "lo"}  # 127.0.0.1
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(("raised", "code"), [("PclmixError('no such case')", 2), (f"SystemExit({LOST})", LOST)])
def test_a_failed_rank_keeps_its_exit_code(tmp_path: Path, raised: str, code: int) -> None:
    """Cleaning up without its peers may abort a rank, as the hook does here."""
    program = f"""
import atexit, json, os, sys
from pclmix.errors import PclmixError
from pclmix.training import launch, start
from pclmix.training.request import TrainRequest
def fail(request):
    raise {raised}
start.run_training = fail
atexit.register(os.abort)
sys.argv = ["rank", launch._to_json(TrainRequest("data", "run")), json.dumps(["pclmix"])]
launch.main()
"""
    file = tmp_path / "error.json"
    env = os.environ | {"TORCHELASTIC_ERROR_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    if code == 2:
        assert json.loads(file.read_text())["message"] == "no such case"


def test_devices_refuses_a_bad_dataset_with_one_message(phantom: Path, tmp_path: Path) -> None:
    dataset = shutil.copytree(phantom, tmp_path / "data")
    (dataset / "labelsTr" / "phantom002_frame01.nii.gz").write_bytes(b"no scribbles")
    command = [sys.executable, "-m", "pclmix", "train", str(dataset), "--out", str(tmp_path / "run"), "--devices", "2"]
    done = subprocess.run([*command, *TWO_RANKS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("phantom002_frame01") == 1
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()

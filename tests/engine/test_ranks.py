"""Two processes train as one: the same weights, queue and statistics, the recipe's batch, an exact resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.data.store import Settings, open_store
from pclmix.engine.checkpoint import LAST, load_checkpoint
from pclmix.engine.feed import Feed
from pclmix.errors import PclmixError

WORKER = Path(__file__).with_name("engine_worker.py")
FOUR = ("engine.iterations=4", "engine.save_every=2")


@pytest.fixture(scope="module")
def launched(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """`pclmix train --devices 2`, launched for real: the run, and what each rank held after each step."""
    folder = tmp_path_factory.mktemp("launched")
    run = folder / "run"
    arguments = ["train", phantom, "--out", run, "--recipe", "tiny", "--device", "cpu", "--devices", "2", *FOUR]
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)],
        env=os.environ | {"TRACE": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return run, [lines(folder / f"{rank}.jsonl") for rank in (0, 1)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ranks_hold_the_same(launched: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    _, (first, second) = launched
    assert [line["step"] for line in first] == [0, 1, 2, 3]
    for one, two in zip(first, second, strict=True):
        for what in ("gradients", "weights", "batchnorm", "queue"):
            assert one[what] == two[what], f"{what} after step {one['step']}"
        assert one["loss"] != two["loss"]  # each had its own images
        assert one["prototypes"] > 0
        assert one["batchnorm_layers"] > 0
    for what in ("gradients", "weights", "batchnorm", "queue"):
        assert len({line[what] for line in first}) == 4, f"{what} never changed"


def test_both_ranks_together_see_the_batch_of_the_recipe(
    phantom: Path, launched: tuple[Path, list[list[dict[str, Any]]]]
) -> None:
    config = load_config("tiny")
    dataset = Dataset.open(phantom)
    store = open_store(dataset, dataset.cases, Settings(config.data.size))
    single = Feed(store, config.engine.batch, config.seed, torch.device("cpu"))
    for one, two in zip(*launched[1], strict=True):
        assert [*one["index"], *two["index"]] == single.places(one["step"]).tolist()
        assert len(one["index"]) == len(two["index"]) == config.engine.batch // 2


def two_ranks(spawn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Two processes as torchrun starts them; what each returned or refused, None of one that was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = options.pop("environment", {})
    killed = given.get("KILL", "none").split()[0]
    started = []
    for rank in ("0", "1"):
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        torchrun |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **given}
        started.append(spawn(*args, **options, environment=torchrun))
    for rank, (process, _) in enumerate(started):
        process.join(timeout=300)
        assert process.exitcode == (-signal.SIGKILL if str(rank) == killed else 0)
    return [json.loads(answer.read_text()) if answer.is_file() else None for _, answer in started]


def test_ctrl_c_on_one_rank_stops_both_and_the_resume_is_exact(
    phantom: Path,
    launched: tuple[Path, list[list[dict[str, Any]]]],
    tmp_path: Path,
    spawn: Callable[..., Any],
    train: Callable[..., Any],
    same_run: Callable[[Path, Path], None],
) -> None:
    run = tmp_path / "run"
    interrupted = {"TRACE": str(tmp_path), "INTERRUPT": "1 2"}
    assert two_ranks(spawn, phantom, run, *FOUR, environment=interrupted) == [False, True]
    assert load_checkpoint(run / LAST)["step"] == 3
    with pytest.raises(PclmixError, match="resume it with --devices 2"):
        train(phantom, run, recipe=None, resume=True)
    assert two_ranks(spawn, phantom, run, recipe=None, resume=True) == [True, True]
    same_run(launched[0], run)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_say_which_process_was_killed_and_the_resume_is_exact(
    rank: int,
    phantom: Path,
    launched: tuple[Path, list[list[dict[str, Any]]]],
    tmp_path: Path,
    spawn: Callable[..., Any],
    same_run: Callable[[Path, Path], None],
) -> None:
    run = tmp_path / "run"
    killed = {"TRACE": str(tmp_path), "KILL": f"{rank} 2"}
    said = two_ranks(spawn, phantom, run, *FOUR, environment=killed)
    assert said[rank] is None
    assert f"process {rank + 1} of 2 (rank {rank}, PID " in said[1 - rank]
    assert "ended during training" in said[1 - rank]
    assert f"the last checkpoint is {run / LAST}. Go on with: pclmix train" in said[1 - rank]
    assert "--resume --device cpu --devices 2" in said[1 - rank]
    assert "\n" not in said[1 - rank]
    assert two_ranks(spawn, phantom, run, recipe=None, resume=True) == [True, True]
    same_run(launched[0], run)


def test_nan_on_one_rank_stops_both(phantom: Path, tmp_path: Path, spawn: Callable[..., Any]) -> None:
    run = tmp_path / "run"
    first, second = two_ranks(spawn, phantom, run, "engine.iterations=4", "engine.save_every=2", method="diverging")
    assert "at step 3, in: poison" in first
    assert second is True  # it leaves the message, and the exit code, to the first
    assert load_checkpoint(run / LAST)["step"] == 2

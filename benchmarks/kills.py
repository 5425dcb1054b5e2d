"""Kill train, crossval and predict at random moments, resume, and compare the result with an uninterrupted run.

Each trial starts in an empty folder and an empty cache. The command is killed (SIGKILL) after a random time, at most
half of what it takes undisturbed, run again, killed again and so on, six times or until it ends by itself; the result
must equal the uninterrupted run bit for bit. Trials are added until each command has been killed --kills times. Recipe
tiny on a phantom, one thread. With the same --work an interrupted benchmark goes on.

    python benchmarks/kills.py --kills 100 --work DIR --out results/reliability/kills.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pclmix.io.files import read_json, write_json
from pclmix.studies.plan import STUDY, marker
from pclmix.training.checkpoint import load_checkpoint
from pclmix.training.log import environment

SHORT = ("--recipe", "tiny", "--device", "cpu", "engine.iterations=12", "engine.save_every=3")
MOST = 6  #: kills in one trial; then the command is left alone
SECONDS = 1800.0  #: after which an undisturbed command counts as hanging


@dataclass(frozen=True)
class Places:
    dataset: Path
    model: Path
    out: Path


Command = Callable[[Places], list[str]]
COMMANDS: dict[str, Command] = {
    "train": lambda p: ["train", str(p.dataset), "--out", str(p.out), "--resume", "--fold", "1", *SHORT],
    "crossval": lambda p: ["crossval", str(p.dataset), "--out", str(p.out), *SHORT],
    "predict": lambda p: ["predict", str(p.model), str(p.dataset), str(p.out), "--uncertainty", "--slicer"],
}


def call(arguments: list[str], cache: str, said: str) -> None:
    """`pclmix ARGUMENTS` in a process that has the libraries already; its output goes to a file."""
    os.setsid()
    os.environ["PCLMIX_CACHE"] = cache
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    from pclmix.cli import main as pclmix

    sys.argv = ["pclmix", *arguments]
    pclmix()


class Killed:
    """One command, run in processes that are killed after some time."""

    def __init__(self, arguments: list[str], cache: Path, said: Path) -> None:
        self.arguments, self.cache, self.said = arguments, cache, said

    def run(self, seconds: float | None = None) -> float | None:
        """Run to the end and return the seconds, or kill after `seconds` and return None."""
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=call, args=(self.arguments, str(self.cache), str(self.said)))
        began = time.monotonic()
        process.start()
        process.join(SECONDS if seconds is None else seconds)
        if process.exitcode is None:
            os.kill(int(process.pid or 0), signal.SIGKILL)
            process.join()
            if seconds is None:
                raise SystemExit(f"{self.arguments[0]} did not end in {SECONDS:.0f} seconds; see {self.said}")
        if process.exitcode == -signal.SIGKILL and seconds is not None:
            return None
        if process.exitcode:
            raise SystemExit(f"pclmix {' '.join(self.arguments)}: exit code {process.exitcode}; see {self.said}")
        return time.monotonic() - began


def differences(one: Path, other: Path) -> list[str]:
    """What differs between the results in two folders; file names, and which part of a checkpoint."""
    found = []
    names = {wanted(path, folder) for folder in (one, other) for path in folder.rglob("*")} - {""}
    if not names:
        raise SystemExit(f"{one} and {other} hold no results to compare")
    for name in sorted(names):
        first, second = one / name, other / name
        if not first.is_file() or not second.is_file():
            found.append(f"{name} is in one of them only")
        elif name.endswith(".ckpt"):
            if not same(plain(first), plain(second)):
                found.append(name)
        elif content(first, one) != content(second, other):
            found.append(name)
    return found


def wanted(path: Path, folder: Path) -> str:
    """The file's name, if it is part of a result: not logs, times, drawings of them, or what differs by nature."""
    name = path.relative_to(folder).as_posix()
    last = path.name
    if not path.is_file() or last.startswith(".") or "tensorboard" in name:
        return ""
    endings = (".nii.gz", ".nrrd", ".csv", ".ckpt", ".txt")
    chosen = last.endswith(endings) or last in ("evaluation.json", "prediction.json", "metrics.jsonl", "config.yaml")
    # previous.ckpt is the save before the last; after a kill between two renames it is another one.
    return name if chosen and last != "previous.ckpt" else ""


def content(path: Path, folder: Path) -> bytes:
    raw = path.read_bytes()
    if path.name.endswith(".gz"):
        return gzip.decompress(raw)
    return raw.replace(str(folder).encode(), b"OUT")


def plain(path: Path) -> dict[str, Any]:
    found = load_checkpoint(path).to_plain()
    found.pop("seconds")
    return found


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def hidden(folder: Path) -> list[Path]:
    """Unfinished files; the empty file that is named by the study's id belongs to the result."""
    study = folder / STUDY
    own = [marker(folder, str(read_json(study)["id"]))] if study.is_file() else []
    return [path for path in folder.rglob(".*") if path not in own]


def age(paths: list[Path]) -> None:
    """Make leftovers two hours old: younger ones could belong to a process that is still writing."""
    for path in paths:
        for part in (path, *path.rglob("*")):
            os.utime(part, (time.time() - 7200,) * 2)


def trial(name: str, unbroken: Path, places: Places, work: Path, usual: float, chance: random.Random) -> dict[str, Any]:
    """Kill a command until it finishes; returns the events and whether the result equals the uninterrupted run."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    here = Places(places.dataset, places.model, work / "out")
    command = Killed(COMMANDS[name](here), work / "cache", work / "said.txt")
    moments: list[float] = []
    while len(moments) < MOST:
        moment = chance.uniform(0, usual / 2)
        if command.run(moment) is not None:
            break
        moments.append(round(moment, 3))
    left = hidden(work / "out")
    age(left)
    command.run()
    return {
        "command": name,
        "kills": moments,
        "different": differences(unbroken, work / "out"),
        "left_by_kills": len(left),
        "left_at_the_end": len(left := hidden(work / "out")),
        "left": [str(path.relative_to(work / "out")) for path in left],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="of each command, at least")
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder to go on in; by default a temporary one")
    parser.add_argument("--out", type=Path, help="the JSON file of the figures")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # as in the processes: recorded with the figures
    multiprocessing.get_context("forkserver").set_forkserver_preload(["pclmix.training.start", "pclmix.inference"])
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        summary = measure(args.kills, args.commands, args.seed, work.resolve(), args.out)
    print(json.dumps(summary, indent=2))
    if any(entry["different"] or entry["left_at_the_end"] for entry in summary["commands"].values()):
        sys.exit("a killed run ended in another way than the unbroken one")


def measure(kills: int, commands: list[str], seed: int, work: Path, out: Path | None) -> dict[str, Any]:
    from pclmix.synth.phantom import make_phantom

    places = Places(work / "phantom", work / "unbroken" / "train", work)
    if not places.dataset.is_dir():
        make_phantom(places.dataset, 3)
    state = work / "trials.json"
    known: dict[str, Any] = read_json(state) if state.is_file() else {"usual": {}, "trials": []}
    for name in COMMANDS:  # in this order: predict needs the model that train makes
        if name not in known["usual"]:
            unbroken = work / "unbroken" / name
            shutil.rmtree(unbroken, ignore_errors=True)
            here = Places(places.dataset, places.model, unbroken)
            taken = Killed(COMMANDS[name](here), work / "cache", work / "said.txt").run()
            known["usual"][name] = taken
            write_json(state, known)
    chance = random.Random(f"{seed} {len(known['trials'])}")
    while True:
        done = {name: sum(len(t["kills"]) for t in known["trials"] if t["command"] == name) for name in commands}
        name = min(done, key=lambda key: done[key])
        if done[name] >= kills:
            break
        entry = trial(name, work / "unbroken" / name, places, work / "trial", known["usual"][name], chance)
        known["trials"].append(entry)
        write_json(state, known)
        summary = summarise(known)
        if out is not None:
            write_json(out, summary)
        print(f"{name}: killed {len(entry['kills'])} times, {entry['different'] or 'equal'}", flush=True)
        if entry["different"]:
            shutil.copytree(work / "trial", work / f"different{len(known['trials'])}", dirs_exist_ok=True)
    return summarise(known)


def summarise(known: dict[str, Any]) -> dict[str, Any]:
    table = {}
    for name in COMMANDS:
        trials = [t for t in known["trials"] if t["command"] == name]
        if trials:
            table[name] = {
                "kills": sum(len(t["kills"]) for t in trials),
                "trials": len(trials),
                "most_kills_in_a_trial": max(len(t["kills"]) for t in trials),
                "median_second_of_a_kill": statistics.median(m for t in trials for m in t["kills"] or [0.0]),
                "unbroken_seconds": round(known["usual"][name], 1),
                "different": sum(bool(t["different"]) for t in trials),
                "unfinished_files_left_by_kills": sum(t["left_by_kills"] for t in trials),
                "left_at_the_end": sum(t["left_at_the_end"] for t in trials),
            }
    details = [
        {"command": t["command"], **{k: t.get(k, []) for k in ("kills", "different", "left")}} for t in known["trials"]
    ]
    return {"commands": table, "environment": environment("cpu"), "trials": details}


if __name__ == "__main__":
    main()

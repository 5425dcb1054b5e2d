"""The workbench server under mixed load, with kills and a full disk: is any acknowledged save lost, does anything grow?

Several clients draw, undo and restore, upload good and bad images, download, train (recipe tiny) and predict. The
server and the workers of jobs are killed (SIGKILL) at random moments, and the disk is full for short periods. During
the first 40 % of the time the server is killed and started again and again; the rest is one life of one server, whose
memory and open files must not grow.

Every state that was acknowledged is followed: the label file must hold the last one and the history the ones before,
checked after each kill and once a minute. Other findings are: an answer 500 or above other than 507 on a full disk, a
request without an answer, an upload that is lost, a job that failed for a reason of its own, unfinished files after
the last start, processes that did not end. Exit code 1 if there is any.

The dataset lies on a small ext4 image, or on a tmpfs, which needs the right to mount: run it as root or as
`unshare -rm make soak`. Without it the disk is never full, and the result says so. Linux only. Only 127.0.0.1 is used.

    python benchmarks/soak.py --minutes 60 --out results/reliability/soak.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pclmix.data.dataset import Dataset
from pclmix.io.files import write_json
from pclmix.training.log import environment
from soaking.clients import draw, look, repeat, train, upload
from soaking.ledger import Ledger, Record
from soaking.world import MARK, Server, World, files_in, fill, marked, small_disk, worker_runs

CLIENTS = 3  #: that draw at the same time, on the same cases
MIB_PER_HOUR, FILES_PER_HOUR = 16.0, 4.0  #: the most that memory and open files of the server may grow
WARM = 240.0  #: seconds of a server's life before growth is measured


def audit(world: World, *, killed: bool = False, fresh: bool = False) -> None:
    """Everything acknowledged is on the disk. Call it while no request is under way."""
    for ledger in world.ledgers.values():
        ledger.audit(killed=killed, fresh=fresh)
    images = world.server.root / "imagesTr"
    for name, content in list(world.doubtful.items()):
        path = images / f"{name}_0000.nii.gz"
        if path.is_file():
            world.uploads[name] = content
        del world.doubtful[name]
    for name, content in world.uploads.items():
        path = images / f"{name}_0000.nii.gz"
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != content:
            world.record.find(f"the uploaded image {path.name} is missing or has another content")
    world.record.count("audits")


def growth(samples: list[tuple[float, float]]) -> dict[str, float]:
    """First, last and largest value, and the slope per hour of a line fitted to (second, value)."""
    seconds, values = np.array(samples).T
    slope = float(np.polyfit(seconds, values, 1)[0]) * 3600 if len(samples) > 2 else 0.0
    third = max(1, len(values) // 3)
    return {
        "minutes": round(float(seconds[-1] - seconds[0]) / 60, 1),
        "samples": len(values),
        "median_of_first_third": round(float(np.median(values[:third])), 1),
        "median_of_last_third": round(float(np.median(values[-third:])), 1),
        "largest": round(float(values.max()), 1),
        "per_hour": round(slope, 2),
    }


class Schedule:
    """Kills, full disks, audits and samples, in the main thread."""

    def __init__(self, world: World, disk: Path | None, seconds: float, chance: random.Random) -> None:
        self.world, self.disk, self.chance, self.seconds = world, disk, chance, seconds
        self.began = time.monotonic()
        self.pace = min(1.0, seconds / 600)  # a short slice has its kills closer together
        self.samples: list[tuple[float, float, int]] = []
        self.lives: list[float] = []
        self.parts: list[dict[str, int]] = []

    def run(self) -> None:
        now = time.monotonic()
        self.kill, self.fill, self.look, self.sample = (
            now + self._after(20, 60),
            now + self._after(60, 120),
            now + 60,
            now,
        )
        while self.world.goes_on():
            time.sleep(0.25)
            now = time.monotonic()
            if now > self.kill and now < self.began + 0.4 * self.seconds:
                self.kill_server()
                self.kill = time.monotonic() + self._after(20, 90)
            elif self.disk is not None and now > self.fill:
                self.full_disk()
                self.fill = time.monotonic() + self._after(90, 240)
            elif now > self.look:
                with self.world.quiet():
                    self.check()
                self.look = time.monotonic() + 60
            if now > self.sample:
                self.samples.append((now, *self.world.server.size()))
                self.sample = now + 3

    def _after(self, low: float, high: float) -> float:
        return self.pace * self.chance.uniform(low, high)

    def kill_server(self) -> None:
        self.lives.append(time.monotonic() - self.world.server.born)
        self.world.record.count("kills of the server")
        with self.world.quiet(kill=True):
            self.check(killed=True)
            self.world.server.start()

    def full_disk(self) -> None:
        assert self.disk is not None
        world, lasts = self.world, self._after(8, 20)
        world.full, world.last_full = True, time.monotonic() + lasts
        fill(self.disk)
        world.record.count("full disks")
        ends = time.monotonic() + lasts
        while time.monotonic() < ends:
            time.sleep(0.25)
            if time.monotonic() < self.began + 0.4 * self.seconds and self.chance.random() < 0.04:
                self.kill_server()
        (self.disk / "ballast").unlink()
        world.full, world.freed = False, time.monotonic()
        world.last_full = time.monotonic() + 5

    def check(self, killed: bool = False) -> None:
        audit(self.world, killed=killed)
        self.parts.append(files_in(self.world.server.root))


def soak(seconds: float, work: Path, *, seed: int = 0, training: bool = True, size: int = 700) -> dict[str, Any]:
    """Run the load in an empty folder, on a disk of `size` MiB (0: where the folder lies); returns the figures."""
    from pclmix.synth.phantom import make_phantom

    record, chance = Record(), random.Random(seed)
    work.mkdir(parents=True, exist_ok=True)
    with small_disk(work / "disk", size) as kind:
        root = work / "disk" / "data"
        make_phantom(root, 3)
        dataset = Dataset.open(root)
        (root / ".pclmix").mkdir()
        server = Server(root, work, {**os.environ, MARK: str(root), "PCLMIX_CACHE": str(work / "cache")})
        server.start()
        ledgers = {case: Ledger(dataset, case, record) for case in dataset.cases}
        world = World(server, record, time.monotonic() + seconds, ledgers)
        world._open.set()
        actions = [(draw, 0.3)] * CLIENTS + [(upload, 3.0), (look, 1.0)] + [(train, 1.0)] * training
        threads = [
            threading.Thread(target=repeat, args=(world, action, pause, f"{seed} {number}"), daemon=True)
            for number, (action, pause) in enumerate(actions)
        ]
        schedule = Schedule(world, None if kind is None else work / "disk", seconds, chance)
        try:
            for thread in threads:
                thread.start()
            schedule.run()
            for thread in threads:
                thread.join(400)
            if any(thread.is_alive() for thread in threads):
                record.find("a client has not ended")
            finish(schedule)
        finally:
            for pid in marked(str(root)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return summarise(schedule, kind, seconds, work)


def finish(schedule: Schedule) -> None:
    """The last kill and start: everything is there, nothing is left over, every process ends."""
    world, record = schedule.world, schedule.world.record
    server, root = world.server, world.server.root
    schedule.lives.append(time.monotonic() - server.born)
    waiting = time.monotonic() + 120
    while worker_runs(root) and time.monotonic() < waiting:
        time.sleep(0.5)
    server.end(signal.SIGKILL)
    audit(world, killed=True, fresh=True)
    server.start()
    if httpx.get(f"{server.address}/api/progress", timeout=60).status_code != 200:
        record.find("the last server does not answer")
    status = server.end(signal.SIGINT)
    if status not in (0, 130):  # 130: ended by Ctrl-C
        record.find(f"the last server ended with exit code {status}")
    audit(world)
    for path in root.rglob(".*"):
        if path != root / ".pclmix":
            record.find(f"left over: {path.relative_to(root)}")
    if (root / ".pclmix" / "incoming").is_dir() and any((root / ".pclmix" / "incoming").iterdir()):
        record.find("left over: .pclmix/incoming is not empty")
    for command in marked(str(root)).values():
        record.find(f"still running: {command}")
    if "Traceback" in (server.work / "server.txt").read_text(errors="replace"):
        record.find(f"a traceback in the server's output: {(server.work / 'server.txt').read_text()[:2000]}")


def summarise(schedule: Schedule, kind: str | None, seconds: float, work: Path) -> dict[str, Any]:
    record, world = schedule.world.record, schedule.world
    last = [s for s in schedule.samples if s[0] > world.server.born or s[0] > schedule.began + 0.4 * seconds]
    last = last or schedule.samples
    warm = [s for s in last if s[0] > last[0][0] + WARM] or last
    memory, files = growth([(s[0], s[1]) for s in warm]), growth([(s[0], s[2]) for s in warm])
    judged = memory["minutes"] >= 10
    if judged and memory["per_hour"] > MIB_PER_HOUR:
        record.find(f"the server's memory grows by {memory['per_hour']} MiB per hour")
    if judged and files["per_hour"] > FILES_PER_HOUR:
        record.find(f"the server's open files grow by {files['per_hour']} per hour")
    parts = {name: max(part.get(name, 0) for part in schedule.parts) for name in set().union(*schedule.parts)}
    counts = record.counts
    return {
        "minutes": round(seconds / 60, 1),
        "disk": kind or "an ordinary folder, never full",
        "clients_drawing": CLIENTS,
        "requests": sum(n for name, n in counts.items() if name.startswith(("GET", "POST"))),
        "slowest_answer_seconds": round(world.slowest, 1),
        "acknowledged_saves": counts["acknowledged saves"],
        "found_in_file_or_history": counts["states found by an audit"] - len(world.ledgers),
        "not_audited_in_time": counts["states not audited in time"],
        "lost": counts["acknowledged saves lost"],
        "server_kills": counts["kills of the server"],
        "worker_kills": counts["kills of a worker"],
        "full_disks": counts["full disks"],
        "server_lives_minutes": [round(life / 60, 1) for life in schedule.lives],
        "memory_MiB": {**memory, "bound_per_hour": MIB_PER_HOUR, "judged": judged},
        "open_files": {**files, "bound_per_hour": FILES_PER_HOUR, "judged": judged},
        "minute_MiB_files": [[round((s[0] - last[0][0]) / 60, 1), round(s[1], 1), s[2]] for s in last[::10]],
        "most_files_in_pclmix": dict(sorted(parts.items())),
        "findings": record.findings,
        "counts": dict(sorted(counts.items())),
        "environment": {**environment("cpu"), "cores": os.cpu_count(), "load_at_the_end": round(os.getloadavg()[0], 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="an empty folder, kept afterwards; by default a temporary one")
    parser.add_argument("--out", type=Path, help="the JSON file of the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = soak(args.minutes * 60, (args.work or Path(temporary)).resolve(), seed=args.seed)
    if args.out is not None:
        write_json(args.out, figures)
    print(json.dumps({key: value for key, value in figures.items() if key != "counts"}, indent=2))
    if figures["findings"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Feed every reader of pclmix with damaged files and requests.

    make fuzz            10,000 inputs for each reader
    make fuzz N=500 READERS="nifti tiff"

Each input is made from a file of the corpus by its number alone (mutations.py). A reader may accept it or refuse it
with PclmixError; anything else is a finding: another exception, a crash, more than SECONDS of computing, or more than
MEMORY in the process. Inputs that fail are kept in --out and summarised at the end; the exit code is then 1. A finding
becomes a test when its file is added to the corpus as READER/found-NAME.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

SECONDS = 5.0  #: of computing for one input
HANGING = 60.0  #: seconds on the clock after which a process is killed
MEMORY = 1 << 30  #: bytes in memory, libraries included
_SPARE = 3 << 30  # of address space beyond what the libraries take
ROUND = 500  #: inputs of one reader before it is the next one's turn
_KEPT = 5  # inputs kept of one kind of finding
#: How a process is started: by forkserver, the libraries are imported once.
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@dataclass
class Tally:
    """What became of the inputs of one reader."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    findings: int = 0
    seconds: float = 0.0  #: of computing, mutation included
    slowest: float = 0.0
    peak_mib: int = 0
    base_mib: int = 0
    noisy: int = 0  #: inputs for which a library printed something
    kinds: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        rounded = {"seconds": round(self.seconds, 1), "slowest": round(self.slowest, 2)}
        return {**vars(self), **rounded, "kinds": dict(self.kinds)}


def seeds_of(reader: str) -> list[Path]:
    from readers import CORPUS

    return sorted(path for path in (CORPUS / reader).iterdir() if not path.name.startswith("found-"))


def make_input(reader: str, seed: int, number: int) -> tuple[str, bytes]:
    """Name and content of an input: the same whenever it is asked for."""
    from server_requests import READERS

    rng = Random(f"{seed}/{reader}/{number}")
    path = rng.choice(seeds_of(reader))
    return path.name, READERS[reader].mutate(rng, path.name, path.read_bytes())


def try_input(reader: str, path: Path, folder: Path) -> tuple[str, str]:
    """`accepted`, `refused` or `finding`, with what was said. `folder` is empty before and after."""
    from readers import require_good_message
    from server_requests import READERS

    from pclmix.errors import PclmixError

    folder.mkdir(parents=True)
    try:
        READERS[reader].read(path, folder)
        return "accepted", ""
    except PclmixError as error:
        if _ran_out(error):
            return "finding", f"MemoryError: {str(error)[:200]}"
        try:
            require_good_message(error)
        except AssertionError as bad:
            return "finding", f"message: {bad}: {str(error)[:300]}"
        return "refused", str(error)
    except (Exception, RecursionError) as error:
        return "finding", _where(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ran_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False


def _where(error: BaseException) -> str:
    """The error with the last lines of pclmix in its traceback, which tell findings apart."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}pclmix{os.sep}" in f.filename]
    place = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-2:]))
    return f"{type(error).__name__} at {place or 'the check'}: {' '.join(str(error).split())[:300]}"


def kind_of(said: str) -> str:
    """Findings of one kind differ only in numbers and quoted words."""
    return re.sub(r"\d+", "0", re.sub(r"'[^']*'|\"[^\"]*\"", "'x'", said.split(": ")[0] + said[said.find(": ") :][:60]))


def memory(key: str) -> int:
    """VmHWM or VmSize of this process in bytes; 0 where the system does not say."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if key == "VmHWM" else 0
    return 1024 * int(next((line.split()[1] for line in text.splitlines() if line.startswith(key)), "0"))


def forget_peak() -> None:
    with suppress(OSError):  # elsewhere the peak is that of all inputs so far
        Path("/proc/self/clear_refs").write_text("5")


def work(reader: str, seed: int, first: int, count: int, folder: str, pipe: Connection) -> None:
    """Try inputs `first` to `first + count`; what is sent: their number before, the outcome after."""
    top = Path(folder)
    noise = top / "stderr.txt"
    handle = os.open(noise, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 2)
    os.environ["PCLMIX_CACHE"], os.environ["COLUMNS"] = str(top / "cache"), "200"
    tempfile.tempdir = str(top)
    from readers import LARGEST

    os.environ["PCLMIX_MAX_BYTES"] = str(LARGEST)
    for path in seeds_of(reader):  # imports the libraries
        outcome, said = try_input(reader, path, top / "work")
        if outcome == "finding":
            pipe.send(("seed", path.name, said))
    if hasattr(resource, "RLIMIT_AS") and memory("VmSize"):
        resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + _SPARE,) * 2)
    forget_peak()
    pipe.send(("base", memory("VmHWM")))
    for number in range(first, first + count):
        began = time.process_time()
        name, data = make_input(reader, seed, number)
        (top / "input").mkdir(exist_ok=True)
        path = top / "input" / name
        path.write_bytes(data)
        pipe.send(("begin", number))
        forget_peak()
        printed, reading = noise.stat().st_size, time.process_time()
        outcome, said = try_input(reader, path, top / "work")
        ended, peak = time.process_time(), memory("VmHWM")
        if outcome != "finding" and ended - reading > SECONDS:
            outcome, said = "finding", f"slow: {ended - reading:.1f} s"
        if outcome != "finding" and peak > MEMORY:
            outcome, said = "finding", f"memory: {peak >> 20} MiB"
        noisy = noise.stat().st_size > printed
        pipe.send(("end", number, outcome, said, ended - began, ended - reading, peak, noisy))
    pipe.send(("done",))


class Campaign:
    """All inputs of one reader, in a process that is started again when it dies."""

    def __init__(self, reader: str, seed: int, out: Path) -> None:
        self.reader, self.seed, self.out = reader, seed, out
        self.tally, self.done = Tally(), 0

    def run(self, until: int) -> None:
        """Try the inputs from where the last call ended."""
        while self.done < until:
            self.done = self._some(self.done, until)
        print(f"\r{self._line()}", flush=True)

    def _some(self, first: int, until: int) -> int:
        """Inputs from `first` until the process ends; the number of the next input."""
        context = multiprocessing.get_context(START)
        ours, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            arguments = (self.reader, self.seed, first, until - first, folder, theirs)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            current = first
            try:
                while True:
                    if not ours.poll(HANGING + (60 if current == first else 0)):
                        self._record(current, "finding", f"hang: {HANGING:.0f} s")
                        return current + 1
                    message = ours.recv()
                    if message[0] == "begin":
                        current = message[1]
                    elif message[0] == "end":
                        self._end(message)
                        current += 1
                    elif message[0] == "base":
                        self.tally.base_mib = max(self.tally.base_mib, message[1] >> 20)
                    elif message[0] == "seed":
                        self._record(-1, "finding", f"seed {message[1]}: {message[2]}")
                    else:
                        return until
            except EOFError:
                process.join(10)
                said = Path(folder, "stderr.txt")
                last = said.read_text(errors="replace")[-500:] if said.is_file() else ""
                self._record(current, "finding", f"crash: exit code {process.exitcode} {last}")
                return current + 1
            finally:
                process.kill()
                process.join()
                ours.close()

    def _end(self, message: tuple[Any, ...]) -> None:
        _, number, outcome, said, seconds, reading, peak, noisy = message
        self.tally.seconds += seconds
        self.tally.slowest = max(self.tally.slowest, reading)
        self.tally.peak_mib = max(self.tally.peak_mib, peak >> 20)
        self.tally.noisy += noisy
        self._record(number, outcome, said)
        if self.tally.inputs % 100 == 0 and sys.stdout.isatty():
            print(f"\r{self._line()}", end="", flush=True)

    def _record(self, number: int, outcome: str, said: str) -> None:
        tally = self.tally
        tally.inputs += number >= 0
        tally.accepted += outcome == "accepted"
        tally.refused += outcome == "refused"
        if outcome != "finding":
            return
        tally.findings += 1
        kind = kind_of(said)
        tally.kinds[kind] += 1
        if tally.kinds[kind] > _KEPT:
            return
        print(f"\r{self.reader} {number}: {said}", flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        if number >= 0:
            name, data = make_input(self.reader, self.seed, number)
            (self.out / f"{self.reader}-{number}-{name}").write_bytes(data)
            (self.out / f"{self.reader}-{number}.txt").write_text(said, errors="replace")

    def _line(self) -> str:
        t = self.tally
        return (
            f"{self.reader:>11}: {t.inputs:>6} inputs, {t.accepted:>6} accepted, {t.refused:>6} refused, "
            f"{t.findings} findings, {t.seconds:.0f} s, {t.peak_mib} MiB"
        )


def main() -> int:
    sys.path[:0] = [str(Path(__file__).parent)]
    from server_requests import READERS

    from pclmix.io.files import write_json
    from pclmix.training.log import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", help=f"of {', '.join(READERS)}; default: all")
    parser.add_argument("--count", type=int, default=10_000, help="inputs for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="folder for inputs that fail")
    parser.add_argument("--summary", type=Path, help="JSON file, to which rows are added; default: OUT/fuzz.json")
    asked = parser.parse_args()
    unknown = set(asked.readers) - set(READERS)
    if unknown or asked.count < 1:
        parser.error(f"unknown reader {', '.join(sorted(unknown))}" if unknown else "--count must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if START == "forkserver":
        multiprocessing.set_forkserver_preload(["server_requests", "onnxruntime", "pydicom", "pclmix.web.serve"])
    campaigns = [Campaign(reader, asked.seed, asked.out) for reader in asked.readers or READERS]
    summary = asked.summary or asked.out / "fuzz.json"
    known = environment("cpu")
    about = {key: known[key] for key in ("pclmix", "commit", "python", "platform")}
    about |= {"command": ["python", "tests/fuzz/fuzz.py", *sys.argv[1:]], "packages": _packages()}
    limits = {"seconds": SECONDS, "memory_mib": MEMORY >> 20}
    content = {"environment": about, "limits": limits, "readers": _earlier(summary)}
    try:
        for until in [*range(ROUND, asked.count, ROUND), asked.count]:
            for campaign in campaigns:
                campaign.run(until)
                row = {**campaign.tally.row(), "seed": asked.seed, "commit": about["commit"]}
                content["readers"][campaign.reader] = row
                write_json(summary, content)
    except KeyboardInterrupt:
        print("\ninterrupted")
    findings = sum(campaign.tally.findings for campaign in campaigns)
    print(f"{sum(campaign.tally.inputs for campaign in campaigns)} inputs, {findings} findings; summary: {summary}")
    return int(findings > 0)


def _earlier(summary: Path) -> dict[str, Any]:
    """Rows of readers that were run before; each has its commit."""
    from pclmix.io.files import read_table

    return dict(read_table(summary)["readers"]) if summary.is_file() else {}


def _packages() -> dict[str, str]:
    from importlib.metadata import version

    names = (
        "torch",
        "numpy",
        "nibabel",
        "pillow",
        "tifffile",
        "pydicom",
        "pynrrd",
        "pyyaml",
        "pydantic",
        "onnxruntime",
    )
    return {name: version(name) for name in (*names, "starlette", "fastapi", "uvicorn", "h11", "safetensors")}


if __name__ == "__main__":
    sys.exit(main())

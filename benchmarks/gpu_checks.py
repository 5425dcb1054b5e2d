"""Checks of training on a GPU, each in separate processes with a time limit; a failure does not stop the others.

Checks:
- start: benchmarks/start.py, seconds to the first step, from nothing and once more
- step: benchmarks/step.py, milliseconds of a step, eager and as a graph
- kernels: the tests of the kernels on the device (needs pytest)
- fused: benchmarks/fused.py, errors and times of each kernel at the shapes of a step
- same: the same short run twice, to see what the device itself does not repeat
- killed: the run, killed with SIGKILL after its first checkpoint and resumed, against the unbroken one
- stopped: the same with SIGTERM
- rounds: two rounds of self-training
- nccl: the run under torchrun with one process, DistributedDataParallel over NCCL in the captured graph
- predict: labels in bf16 against float32
- memory: a run that does not fit into memory, with its message

    python benchmarks/gpu_checks.py ACDC --recipe hull --out checks.json --work /tmp/checks encoder.weights=FILE
    python benchmarks/gpu_checks.py PHANTOM --device cpu --recipe tiny --out /tmp/checks.json --work /tmp/checks

`start`, `step`, `fused` and `memory` run alone, the others at once. About three minutes on an H200. The file is written
after every check; those with `ok` false have the end of what was printed. --patience multiplies the time limits.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from pclmix.io.files import read_json, write_json
from pclmix.training.checkpoint import load_checkpoint
from pclmix.training.log import environment

BENCHMARKS = Path(__file__).parent
#: Seconds that a check may take on a GPU.
LIMITS = {"start": 90, "step": 75, "kernels": 120, "fused": 75, "memory": 45, "predict": 60}
LIMIT = 100
#: Names the loopback interface: a machine without a network may have no other, and no host name.
LOCAL = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
#: GiB left free for a run that must run out of memory; a step of `hull` takes 7.
ROOM = 4
_TAIL = 1500  # characters

_PREDICT = """
import sys, time, torch
from pclmix.data.dataset import Dataset
from pclmix.inference.torch import load
model, root, device = sys.argv[1:]
dataset = Dataset.open(root)
images = [dataset.read_image(case) for case in dataset.cases[:6]]
labels = {}
for precision in ("32", "bf16"):
    predictor = load(model, device=device, precision=precision)
    began = time.perf_counter()
    labels[precision] = [predictor.predict(i.array, i.geometry.spacing) for i in images]
    print(precision, "seconds", round(time.perf_counter() - began, 2))
equal = sum(float((a == b).mean()) for a, b in zip(*labels.values())) / len(images)
print("equal", equal)
"""
_HOG = """
import sys, time, torch
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
time.sleep(float(sys.argv[2]))
"""
_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
from pclmix.cli import main
sys.exit(main())
"""


class CheckError(Exception):
    """A check failed."""


class Checks:
    """The checks by name; each returns what it measured or raises."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.cuda = args, args.work, args.device != "cpu"
        self.environment = {**os.environ, "PCLMIX_CACHE": str(args.work / "cache")}

    def call(self, command: list[Any], limit: float, **variables: str) -> str:
        """The output of a command; raises if it fails or takes too long."""
        words, limit = [str(word) for word in command], limit * self.args.patience
        process = subprocess.Popen(
            words, env=self.environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children
            said, _ = process.communicate()
            raise CheckError(f"took more than {limit:.0f} s: {said[-_TAIL:]}") from None
        if process.returncode:
            raise CheckError(f"exit code {process.returncode}: {said[-_TAIL:]}")
        return said

    def script(self, name: str, *words: Any) -> str:
        return self.call([sys.executable, BENCHMARKS / name, *words], LIMITS[Path(name).stem])

    def train(self, run: Path, *words: Any, resume: bool = False) -> list[Any]:
        """The command of a short run without evaluation."""
        args = self.args
        command = [sys.executable, "-m", "pclmix", "-v", "train", args.dataset, "--out", run, "--device", args.device]
        if resume:
            return [*command, "--resume"]
        steps = [f"engine.iterations={args.steps}", f"engine.save_every={args.steps // 2}", "rounds.count=1"]
        return [*command, "--fold", "1", "--recipe", args.recipe, *args.overrides, *steps, *words]

    def start(self) -> dict[str, Any]:
        out = self.work / "start.json"
        words = ["--recipe", self.args.recipe, "--device", self.args.device, "--out", out, *self.args.overrides]
        self.script("start.py", self.args.dataset, *words)
        return {key: value for key, value in read_json(out).items() if key.endswith("_s")}

    def step(self) -> dict[str, Any]:
        out = self.work / "step.json"
        small = ["--net", "resnet18", "--size", 64, "--batch", 4, "--steps", 2]
        self.script("step.py", "--device", self.args.device, "--out", out, *([] if self.cuda else small))
        return {k: v for k, v in read_json(out).items() if k not in ("environment", "settings")}

    def kernels(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", BENCHMARKS.parent / "tests/kernels"]
        return {"text": self.call(command, LIMITS["kernels"]).strip().splitlines()[-1]}

    def fused(self) -> dict[str, Any]:
        if not self.cuda:
            return {"left_out": "needs CUDA"}
        return {"table": self.script("fused.py").splitlines()}

    def same(self) -> dict[str, Any]:
        """The reference of the checks below, trained twice."""
        with ThreadPoolExecutor(2) as pool:
            runs = [self.work / "reference", self.work / "repeated"]
            said = list(pool.map(lambda run: self.call(self.train(run), LIMIT), runs))
        graphs = ["one CUDA graph" in text for text in said]
        if self.cuda and not all(graphs):
            raise CheckError("the step was not captured as a graph")
        return {"graph": graphs, "plain_kernels": ["disagree" in text for text in said], **self.compare("repeated")}

    def killed(self) -> dict[str, Any]:
        return self.broken("killed", signal.SIGKILL)

    def stopped(self) -> dict[str, Any]:
        return self.broken("stopped", signal.SIGTERM)

    def broken(self, name: str, how: signal.Signals) -> dict[str, Any]:
        """A run that a signal ends after its first checkpoint, then resumed; compared when the reference is there."""
        run, began, limit = self.work / name, time.monotonic(), LIMIT * self.args.patience
        with (self.work / f"{name}.txt").open("wb") as said:
            process = subprocess.Popen(
                [str(word) for word in self.train(run)], env=self.environment, stdout=said, stderr=said
            )
            while not (run / "last.ckpt").is_file():
                if process.poll() is not None or time.monotonic() - began > limit:
                    process.kill()
                    raise CheckError((self.work / f"{name}.txt").read_text()[-_TAIL:])
                time.sleep(0.005)
            process.send_signal(how)
            code = process.wait(timeout=limit)
        at = read_json(run / "run.json")["step"] if how is signal.SIGTERM else self.args.steps // 2
        self.call(self.train(run, resume=True), LIMIT)
        return {"exit_code": code, "resumed_from_step": at}

    def rounds(self) -> dict[str, Any]:
        run, half = self.work / "rounds", self.args.steps // 2
        words = ["rounds.count=2", f"engine.iterations={half}", f"rounds.iterations={half}"]
        said = self.call(self.train(run, *words), LIMIT)
        status = read_json(run / "run.json")
        if status["status"] != "finished" or status["step"] != 2 * half or not (run / "round2.npz").is_file():
            raise CheckError(f"the run ended as {status}")
        return {"graphs": said.count("one CUDA graph"), "seconds_of_training": status["seconds"]}

    def nccl(self) -> dict[str, Any]:
        command = self.train(self.work / "nccl")
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        ranks += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m"]
        at = command.index("-m")
        said = self.call([*command[:at], *ranks, *command[at + 1 :]], LIMIT, **LOCAL)
        if self.cuda and "one CUDA graph" not in said:
            raise CheckError("the step was not captured as a graph")
        return {"graph": "one CUDA graph" in said}

    def predict(self) -> dict[str, Any]:
        words = [self.work / "reference", self.args.dataset, self.args.device]
        said = self.call([sys.executable, "-c", _PREDICT, *words], LIMITS["predict"])
        return {"equal": float(said.rsplit("equal", 1)[1]), "text": said.splitlines()[-3:]}

    def memory(self) -> dict[str, Any]:
        """Exit code 2, one message that names the settings, and no traceback."""
        command = self.train(self.work / "memory", *([] if self.cuda else ["engine.batch=2000"]))
        hog = None
        try:
            if self.cuda:
                words = [sys.executable, "-c", _HOG, str(ROOM), str(LIMITS["memory"])]
                hog = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
                assert hog.stdout is not None
                if hog.stdout.readline().strip() != "taken":
                    raise CheckError("the device's memory could not be taken")
            else:
                command = [sys.executable, "-c", _LIMITED, *command[command.index("pclmix") + 1 :]]
            done = subprocess.run(
                [str(word) for word in command],
                env=self.environment, capture_output=True, text=True, timeout=LIMITS["memory"] * self.args.patience,
            )  # fmt: skip
        finally:
            if hog is not None:
                hog.kill()
                hog.wait()
        said = done.stderr[-_TAIL:]
        if done.returncode != 2 or "engine.batch" not in said or "Traceback" in said:
            raise CheckError(f"exit code {done.returncode}: {said}")
        return {"exit_code": 2, "message": said.strip().splitlines()[-1]}

    def compare(self, name: str) -> dict[str, Any]:
        """How far the weights of a run are from the reference."""
        one, other = (load_checkpoint(self.work / run / "last.ckpt").method for run in ("reference", name))
        pairs = [(one[key].double(), other[key].double()) for key in one]
        difference = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
        length = sum(float(a.square().sum()) for a, _ in pairs) ** 0.5
        logs = [(self.work / run / "metrics.jsonl").read_text() for run in ("reference", name)]
        return {
            "bit_equal": all(bool((a == b).all()) for a, b in pairs),
            "relative_difference": difference / length,
            "largest_difference": max(float((a - b).abs().max()) for a, b in pairs),
            "logs_equal": logs[0] == logs[1],
        }


ALONE_FIRST, TOGETHER, ALONE_LAST = (
    ("start", "step"),
    ("kernels", "same", "killed", "stopped", "rounds", "nccl"),
    ("predict", "fused", "memory"),
)
COMPARED = ("killed", "stopped", "nccl")  #: with the reference, when all are there


def timed(check: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The result or error of a check, and its seconds."""
    began = time.perf_counter()
    try:
        found = {"ok": True, **check()}
    except Exception as error:  # reported; the other checks continue
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--recipe", default="hull")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40, help="of the short runs")
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=ALONE_FIRST + TOGETHER + ALONE_LAST)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_intermixed_args()
    args.work.mkdir(parents=True, exist_ok=True)
    checks, results = Checks(args), dict[str, Any]()

    def note(name: str, found: dict[str, Any]) -> None:
        results[name] = found
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, results)
        print(name, found, flush=True)

    def wanted(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if args.only is None or name in args.only]

    for name in wanted(ALONE_FIRST):
        note(name, timed(getattr(checks, name)))
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        running = {pool.submit(timed, getattr(checks, name)): name for name in wanted(TOGETHER)}
        for future in as_completed(running):
            note(running[future], future.result())
    for name in COMPARED:
        if results.get(name, {}).get("ok"):
            found = timed(lambda name=name: checks.compare(name))
            note(name, {**results[name], **found, "seconds": results[name]["seconds"]})
    for name in wanted(ALONE_LAST):
        note(name, timed(getattr(checks, name)))
    note("environment", timed(lambda: {"machine": environment(args.device)}))
    raise SystemExit(0 if all(found["ok"] for found in results.values()) else 1)


if __name__ == "__main__":
    main()

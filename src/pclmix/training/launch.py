"""`--devices N`: one rank per device, started by torchrun's launcher. Run as a module, this file is one rank."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from pclmix.errors import PclmixError
from pclmix.io.files import read_table
from pclmix.io.threads import thread_settings
from pclmix.training.checkpoint import LAST
from pclmix.training.log import RUN
from pclmix.training.parallel import LOST
from pclmix.training.request import TrainRequest

_SECONDS_TO_SAVE = 120  # seconds for ranks to stop


def launch(request: TrainRequest) -> bool:
    """Train with one process per device; True when finished, False when interrupted.

    On several nodes the same command is run on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = _rendezvous(request.nodes)
    if "shutdown_timeout" in signature(LaunchConfig).parameters:  # older versions of torch wait 30 seconds
        options["shutdown_timeout"] = _SECONDS_TO_SAVE
    config = LaunchConfig(
        min_nodes=request.nodes,
        max_nodes=request.nodes,
        nproc_per_node=request.devices,
        run_id="pclmix",
        max_restarts=0,
        **options,
    )
    command = json.dumps(sys.argv)  # for environment.json
    with _prepared(request.devices, request.nodes):
        try:
            elastic_launch(config, sys.executable)("-m", "pclmix.training.launch", _to_json(request), command)
        except ChildFailedError as error:
            raise _explained(error, request) from None
        except SignalException:  # the ranks received the signal, saved and ended
            return False
    status = read_table(request.out / RUN).get("status") if (request.out / RUN).is_file() else "finished"
    return bool(status == "finished")


def _rendezvous(nodes: int) -> dict[str, Any]:
    if nodes == 1:
        from pclmix.training import rendezvous

        rendezvous.register()
        return {"rdzv_backend": rendezvous.BACKEND, "rdzv_endpoint": "", "local_addr": "localhost"}
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not os.environ.get(name)]
    if missing:
        raise PclmixError(
            f"--nodes {nodes}: set {', '.join(missing)} on each node, or use torchrun itself: torchrun "
            f"--nnodes {nodes} --nproc-per-node N --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m pclmix train ..."
        )
    endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"rank": int(os.environ["NODE_RANK"]), "timeout": 900},
    }


@contextmanager
def _prepared(processes: int, nodes: int) -> Iterator[None]:
    """Divide the cores among ranks, silence the launcher's failure reports, restore signal handlers.

    On one node gloo uses the loopback interface; by itself it takes the one that the host's name belongs to.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    level, before = logger.level, {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)
    logger.setLevel(logging.CRITICAL)
    os.environ |= thread_settings(processes)
    if nodes == 1 and sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in before.items():
            try:
                signal.signal(number, handler)
            except ValueError:
                break  # not the main thread: nothing to restore


def _explained(error: Any, request: TrainRequest) -> PclmixError:
    """The error of the rank that failed first and caused the others to stop."""
    own = {r: f for r, f in error.failures.items() if f.exitcode not in (LOST, -signal.SIGTERM)}
    rank, failure = min((own or error.failures).items(), key=lambda item: item[1].timestamp)
    said = failure.error_file_data.get("message")
    if isinstance(said, str) and failure.exitcode == 2:
        return PclmixError(said)
    last = request.out / LAST
    kept = f"the last checkpoint is {last}" if last.is_file() else "there is no checkpoint yet"
    how = f"was killed by {failure.signal_name()} (too little memory?)" if failure.exitcode < 0 else "failed"
    return PclmixError(
        f"process {rank + 1} of {request.world} (rank {rank}, PID {failure.pid}) {how}; {kept}. "
        f"Continue with: {request.resume_command()}"
    )


def _to_json(request: TrainRequest) -> str:
    paths = {name: str(value) for name, value in vars(request).items() if isinstance(value, Path)}
    content = asdict(request) | paths
    return json.dumps(content)


def _from_json(text: str) -> TrainRequest:
    content = json.loads(text)
    paths = {name: Path(content[name]) for name in ("dataset", "out", "start_from") if content[name] is not None}
    return TrainRequest(**content | paths)


def _end(code: int) -> NoReturn:
    """End at once, without the interpreter's cleanup.

    In it gloo's threads may abort a rank that has lost its peers, and others would see this rank's connections close
    long before the launcher sees its end: the launcher would report them in place of the error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """One rank: train, and write errors for the launcher."""
    from pclmix.training.start import run_training

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    request, sys.argv = _from_json(sys.argv[1]), json.loads(sys.argv[2])
    try:
        run_training(request)
    except KeyboardInterrupt:
        sys.exit(130)
    except PclmixError as error:
        # The format of torch.distributed.elastic's error files.
        content = json.dumps({"message": str(error), "timestamp": str(int(time.time()))})
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(content, encoding="utf-8")
        _end(2)
    except SystemExit as stop:
        if stop.code == LOST:
            _end(LOST)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # avoids output of exceptions at interpreter exit


if __name__ == "__main__":
    main()

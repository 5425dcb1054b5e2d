"""A connection to Ray: its nodes, tasks with the resources they ask for, and which error means a lost worker.

Ray is imported by `connect` alone. An address is never guessed: without one nothing connects, and `local` starts a Ray
of its own that listens on the loopback interface only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pclmix import __version__
from pclmix.errors import PclmixError, need_extra

LOCAL, AUTO = "local", "auto"
CONNECT_SECONDS = 60.0  #: for a node to answer the first question
ANSWER_SECONDS = 10.0  #: for an address to accept a connection


@dataclass(frozen=True)
class Resources:
    """What one run or worker asks for; a fraction of a GPU shares it."""

    cores: int = 1
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.cores} core(s)" + (f" and {self.gpus:g} GPU(s)" if self.gpus else "")


@dataclass(frozen=True)
class Node:
    """One node of the cluster."""

    id: str
    name: str
    address: str
    cores: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    def slots(self, resources: Resources) -> int:
        """How many tasks with these resources fit on the node at once."""
        by_cores = int(self.cores // resources.cores)
        return min(by_cores, int(self.gpus / resources.gpus + 1e-9)) if resources.gpus else by_cores


@dataclass(frozen=True)
class ClusterOptions:
    """What a command was told of a cluster; the defaults run everything in this process."""

    address: str | None = None  #: local, auto or HOST:PORT
    cores: int | None = None  #: of each run; 1 on a cluster, what torch takes elsewhere
    gpus: float | None = None  #: of each run; 1 where the cluster has GPUs and the device is not cpu

    def __post_init__(self) -> None:
        """Validate arguments passed from Python, too."""
        if self.cores is not None and self.cores < 1:
            raise PclmixError(f"--cores {self.cores}: a run needs at least one core")
        if self.gpus is not None and (self.gpus < 0 or (self.gpus > 1 and self.gpus % 1)):
            raise PclmixError(f"--gpus {self.gpus:g}: a run takes a fraction of one GPU, such as 0.5, or whole ones")
        if self.gpus is not None and self.address is None:
            raise PclmixError(f"--gpus {self.gpus:g} needs --cluster; without it, --device chooses")


HERE = ClusterOptions()


class LostError(Exception):
    """A worker process or its node ended before its task did. The task itself is not to blame."""


class Cluster:
    """An open connection. A `ref` is Ray's promise of a task's result."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._remote: dict[Any, Any] = {}

    @property
    def address(self) -> str:
        """HOST:PORT of the cluster."""
        return str(self._ray.get_runtime_context().gcs_address)

    @property
    def here(self) -> str:
        """The node of this process, by its id."""
        return str(self._ray.get_runtime_context().get_node_id())

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        return [
            Node(
                str(node["NodeID"]),
                str(node["NodeManagerHostname"]),
                str(node["NodeManagerAddress"]),
                float(node["Resources"].get("CPU", 0)),
                float(node["Resources"].get("GPU", 0)),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def resources(self, options: ClusterOptions, device: str, devices: int = 1) -> Resources:
        """What each run asks for; refused where no node could ever give it."""
        nodes = self.nodes()
        gpus = options.gpus
        if gpus is None:
            gpus = float(devices) if device != "cpu" and any(node.gpus for node in nodes) else 0.0
        if device == "cuda" and not gpus:
            raise PclmixError("--device cuda: no node of the cluster has a GPU that Ray knows of")
        if device == "cpu" and gpus:
            raise PclmixError(f"--device cpu does not use --gpus {gpus:g}; leave one of them out")
        wanted = Resources(options.cores or 1, gpus)
        if not any(node.slots(wanted) for node in nodes):
            known = ", ".join(f"{node}: {node.cores:g} core(s), {node.gpus:g} GPU(s)" for node in nodes[:5])
            raise PclmixError(f"no node of the cluster has {wanted} for a run; it has {known}")
        return wanted

    def submit(
        self, work: Callable[..., Any], *arguments: Any, resources: Resources, node: Node | None = None, name: str = ""
    ) -> Any:
        """Queue `work(*arguments)` as one task. Ray never repeats it by itself: who submits decides."""
        if work not in self._remote:  # a function travels once, however many tasks call it
            self._remote[work] = self._ray.remote(work)
        return self._remote[work].options(**self._options(resources, node), max_retries=0, name=name).remote(*arguments)

    def actor(
        self, kind: type[Any], *arguments: Any, resources: Resources, node: str | None = None, threads: int = 1
    ) -> Any:
        """An object on some node, or on the one with this id; Ray makes it anew where its process is lost."""
        options = self._options(resources, node) | {"max_restarts": -1, "max_concurrency": threads}
        return self._ray.remote(kind).options(**options).remote(*arguments)

    def _options(self, resources: Resources, node: Node | str | None) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": resources.cores, "num_gpus": resources.gpus}
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            place = node.id if isinstance(node, Node) else node
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place, soft=False)
        return options

    def ready(self, refs: Sequence[Any], seconds: float) -> list[Any]:
        """Those that have ended, one way or another; waits at most so long for the first."""
        first, rest = self._ray.wait(list(refs), num_returns=1, timeout=seconds)
        more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0) if first and rest else ([], [])
        return [*first, *more]

    def get(self, ref: Any, seconds: float | None = None) -> Any:
        """The result; LostError where worker or node were lost, else what the task raised."""
        errors = self._ray.exceptions
        lost = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.LocalRayletDiedError,
            errors.OutOfMemoryError,
            errors.ActorDiedError,
            errors.ActorUnavailableError,
            errors.ObjectLostError,
            errors.TaskUnschedulableError,
        )
        try:
            return self._ray.get(ref, timeout=seconds)
        except lost as error:
            raise LostError(_first_line(error)) from error
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error  # as the task raised it, without Ray's frames in its text
            raise

    def cancel(self, ref: Any) -> None:
        """A task that waits is dropped; one that runs sees Ctrl-C."""
        self._ray.cancel(ref)

    def require_ready(self, paths: Sequence[Path] = ()) -> None:
        """Refuse a node with another pclmix, whose results might differ, or one that cannot read these files."""
        asked = {node: self.submit(_look, tuple(paths), resources=Resources(0), node=node) for node in self.nodes()}
        for node, ref in asked.items():
            try:
                version, unreadable = self.get(ref, CONNECT_SECONDS)
            except (LostError, self._ray.exceptions.RayError, ImportError) as error:
                raise PclmixError(
                    f"node {node} cannot run pclmix {__version__} ({_first_line(error)}); install it there, with the "
                    "same Python packages, or take the node out of the cluster"
                ) from error
            if version != __version__:
                raise PclmixError(
                    f"node {node} has pclmix {version}, this one {__version__}; install the same everywhere"
                )
            if unreadable:
                raise PclmixError(
                    f"node {node} cannot read {unreadable[0]}; put it where every node sees it under the same path"
                )


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Join the cluster at `address` (HOST:PORT), this user's own (`auto`), or start one of this host (`local`)."""
    require_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" not in os.environ and _has_token():  # Ray's own commands do the same, its init does not
        os.environ["RAY_AUTH_MODE"] = "token"
    if address == LOCAL:
        # Ray's only switch for listening on 127.0.0.1 and nowhere else; on Windows and macOS that is the default.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = need_extra("ray", "cluster", "--cluster")
    common = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if ray.is_initialized():  # the Python program that calls us has its own connection
        yield Cluster(ray)
        return
    place = own_cluster() if address == AUTO else address
    if address != LOCAL:
        _require_answer(place, address)
    try:
        # No dashboard; a cluster that somebody else started has its own or none.
        more = {"include_dashboard": False} if address == LOCAL else {}
        ray.init(address=place, namespace="pclmix", **more, **common)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        known = "Ray does not start" if address == LOCAL else f"no Ray cluster answers at {place}"
        raise PclmixError(
            f"--cluster {address}: {known} ({_first_line(error)}); start one with `ray start --head`, give its "
            "HOST:PORT, and RAY_AUTH_MODE=token where it asks for a token"
        ) from error
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def require_address(address: str) -> None:
    """Refuse what is no address before Ray is imported."""
    if address not in (LOCAL, AUTO) and not _is_address(address):
        raise PclmixError(f"--cluster {address}: write local, auto or the HOST:PORT of a Ray cluster")


def _require_answer(place: str, address: str) -> None:
    """Refuse at once an address at which nothing listens: Ray would try for minutes and write warnings."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise PclmixError(
            f"--cluster {address}: nothing answers at {place} ({error}); start a cluster with `ray start --head`, or "
            "correct the address"
        ) from error


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon and port.isdigit() and "//" not in text)


def own_cluster() -> str:
    """The HOST:PORT that `auto` stands for: RAY_ADDRESS, or what this user's last `ray start` here wrote down.

    Ray's own `auto` would go on to join any Ray that runs on the host, whoever started it.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if named:
        if not _is_address(named):
            raise PclmixError(f"--cluster auto: RAY_ADDRESS={named} is not the HOST:PORT of a Ray cluster")
        return named
    from ray._common.utils import get_ray_address_file

    path = Path(get_ray_address_file(None))
    try:
        if hasattr(os, "getuid") and path.stat().st_uid not in (os.getuid(), 0):
            raise PclmixError(
                f"--cluster auto: {path} is another user's; give the HOST:PORT of the cluster if you trust it"
            )
        found = path.read_text(encoding="utf-8").strip()
    except OSError:
        found = ""
    if not _is_address(found):
        raise PclmixError(
            "--cluster auto: no cluster is known to Ray here; start one with `ray start --head`, set RAY_ADDRESS, or "
            "give its HOST:PORT"
        )
    return found


def _has_token() -> bool:
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").is_file()


def _look(paths: Sequence[Path]) -> tuple[str, list[Path]]:
    """Runs on a node: its version, and what it cannot read."""
    return __version__, [path for path in paths if not os.access(path, os.R_OK)]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(".")[:300] if lines else type(error).__name__

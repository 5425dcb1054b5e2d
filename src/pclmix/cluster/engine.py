"""A connection to Ray: nodes, tasks with resources, detection of lost workers.

Only `connect` imports Ray. An address is never guessed: without one nothing connects, and `local` starts a separate
Ray that listens on the loopback interface only.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pclmix import __version__
from pclmix.errors import PclmixError, need_extra

LOCAL, AUTO = "local", "auto"
CONNECT_SECONDS = 60.0  #: for a node to answer the first question
ANSWER_SECONDS = 10.0  #: for an address to accept a connection
#: Ray's limits for joining a cluster. Its own defaults wait minutes for something else that listens at the address.
_PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": "1",  # attempts
    "RAY_py_gcs_connect_timeout_s": "10",
    "RAY_gcs_server_request_timeout_seconds": "30",
}


@dataclass(frozen=True)
class Resources:
    """Resources of one run or worker; a fraction of a GPU shares it."""

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
    """Cluster options of a command; the defaults run everything in this process."""

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
    """A worker process or its node ended before its task. The task itself did not fail."""


class Cluster:
    """An open connection. A `ref` is Ray's future of a task's result."""

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
        """The resources of each run; refused if no node has them."""
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
        """Queue `work(*arguments)` as one task. Ray does not retry it: the caller decides."""
        if work not in self._remote:  # a function is sent once, however many tasks call it
            self._remote[work] = self._ray.remote(work)
        return self._remote[work].options(**self._options(resources, node), max_retries=0, name=name).remote(*arguments)

    def actor(
        self,
        kind: type[Any],
        *arguments: Any,
        resources: Resources,
        node: str | None = None,
        threads: int = 1,
        name: str | None = None,
    ) -> Any:
        """An actor on some node, or on the one with this id; Ray recreates it if its process is lost.

        Others find it by its `name`: one whose arguments held another actor could not be recreated reliably.
        """
        options = self._options(resources, node) | {"max_restarts": -1, "max_concurrency": threads, "name": name}
        return self._ray.remote(kind).options(**options).remote(*arguments)

    def _options(self, resources: Resources, node: Node | str | None) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": resources.cores, "num_gpus": resources.gpus}
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            place = node.id if isinstance(node, Node) else node
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place, soft=False)
        return options

    def ready(self, refs: Sequence[Any], seconds: float) -> list[Any]:
        """The refs that have succeeded or failed; waits for the first at most so long."""
        first, rest = self._ray.wait(list(refs), num_returns=1, timeout=seconds)
        more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0) if first and rest else ([], [])
        return [*first, *more]

    def get(self, ref: Any, seconds: float | None = None) -> Any:
        """The result. Raises LostError if the worker or node was lost, else the task's error."""
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
            raise LostError(_first_line(error).partition(". ")[0]) from error  # Ray goes on with where its logs are
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error  # the task's own error, without Ray's frames
            raise

    def cancel(self, ref: Any) -> None:
        """Drop a waiting task; interrupt a running one as Ctrl-C does."""
        self._ray.cancel(ref)

    def require_ready(self, paths: Sequence[Path] = ()) -> None:
        """Refuse a node with other versions of pclmix or torch, or without access to these files."""
        asked = {node: self.submit(_look, tuple(paths), resources=Resources(0), node=node) for node in self.nodes()}
        here, _ = _look(())
        for node, ref in asked.items():
            try:
                there, unreadable = self.get(ref, CONNECT_SECONDS)
            except (LostError, self._ray.exceptions.RayError, ImportError) as error:
                raise PclmixError(
                    f"node {node} cannot run pclmix {__version__} ({_first_line(error)}); install it there, with the "
                    "same Python packages, or take the node out of the cluster"
                ) from error
            for name in here:
                if there[name] != here[name]:
                    raise PclmixError(
                        f"node {node} has {name} {there[name]}, this one {here[name]}; install the same everywhere"
                    )
            if unreadable:
                raise PclmixError(
                    f"node {node} cannot read {unreadable[0]}; put it where every node sees it under the same path"
                )


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Join the cluster at `address` (HOST:PORT), this user's own (`auto`), or start one of this host (`local`)."""
    require_address(address)
    with _environment(address):
        ray = need_extra("ray", "cluster", "--cluster")
        if ray.is_initialized():  # the calling program has its own connection
            yield Cluster(ray)
            return
        _reread_settings()
        place = own_cluster() if address == AUTO else address
        if address != LOCAL:
            _require_answer(place, address)
        try:
            # No dashboard; an existing cluster has its own or none.
            more = {"include_dashboard": False} if address == LOCAL else {}
            common = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
            with _with_the_handler_of_before():
                ray.init(address=place, namespace="pclmix", **more, **common)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            raise PclmixError(f"--cluster {address}: {_reason(error, place)}") from error
        try:
            yield Cluster(ray)
        finally:
            with _without_interrupts():
                ray.shutdown()


@contextmanager
def _environment(address: str) -> Iterator[None]:
    """Ray's settings in the environment; `local` gets a token of its own and listens on the loopback interface."""
    before = dict(os.environ)
    settings = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address == LOCAL:
        # The first is Ray's only switch for listening on 127.0.0.1 alone; on Windows and macOS that is the default.
        # Ray's own token would be written to the home folder, readable by every user of the host.
        own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ |= {**own, "RAY_AUTH_MODE": "token"}
    else:
        settings |= _PATIENCE
        if _has_token():  # Ray's commands do this too, ray.init does not
            settings["RAY_AUTH_MODE"] = "token"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _reread_settings() -> None:
    """Ray reads its environment once, and it may have been imported before or have had another cluster's token."""
    with suppress(ImportError, AttributeError):
        inner: Any = import_module("ray._raylet")
        inner.Config.initialize("")
        inner.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _with_the_handler_of_before() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray's prints a stack and aborts the process in the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for the few seconds in which Ray ends its processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _reason(error: BaseException, place: str) -> str:
    """Why there is no connection, and the way out."""
    said = f"{error} {error.__cause__ or ''}"
    if place == LOCAL:
        return f"Ray does not start ({_first_line(error)}); its logs are in /tmp/ray/session_latest/logs"
    if "AuthToken" in said or "Unauthenticated" in said:
        return (
            f"the cluster at {place} asks for another token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH to that of its `ray start`"
        )
    if "No node info" in said:
        return (
            f"this computer is not a node of the cluster at {place}; give the command on one of its nodes, or add this "
            f"one with `ray start --address {place}`"
        )
    if "ersion mismatch" in said:
        return f"{' '.join(str(error).split())[:400]}; install the same versions on every node"
    return (
        f"no Ray cluster answers at {place} ({_first_line(error)}); start one with `ray start --head`, or correct the "
        "address"
    )


def require_address(address: str) -> None:
    """Refuse an invalid address before importing Ray."""
    if address not in (LOCAL, AUTO) and not _is_address(address):
        raise PclmixError(f"--cluster {address}: write local, auto or the HOST:PORT of a Ray cluster")


def _require_answer(place: str, address: str) -> None:
    """Refuse an address at which nothing listens: Ray would retry for minutes."""
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
    """The HOST:PORT of `auto`: RAY_ADDRESS, or the address recorded by this user's last `ray start` on this host.

    Ray's own `auto` would join any Ray on the host, also another user's.
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


def _look(paths: Sequence[Path]) -> tuple[dict[str, str], list[Path]]:
    """Runs on a node: returns its versions, which results depend on, and the files that it cannot read."""
    versions = {"pclmix": __version__, "torch": version("torch").partition("+")[0]}  # +cpu and +cu130 may be mixed
    return versions, [path for path in paths if not os.access(path, os.R_OK)]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(".")[:300] if lines else type(error).__name__

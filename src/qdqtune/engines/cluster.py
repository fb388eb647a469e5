"""Workers on a Ray cluster: a Ray actor on each device, which passes requests to its worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import Device, needs_gpu
from qdqtune.engines.execution import cancelled_by, wait_for
from qdqtune.engines.process import NODE_LOST, Program
from qdqtune.engines.remote import FarWorker
from qdqtune.errors import BadOption, EngineUnavailable, QdqtuneError, one_line
from qdqtune.system.interpreter import python
from qdqtune.system.writing import TEMPORARY, Scratch, temporary_folder

NETWORK_SECONDS = 60.0
"""Seconds that a request and its answer may spend in the network, beyond the time of the work. Chosen, not measured."""

WAIT_SECONDS = 60.0
"""How long a worker may wait for a free device. Chosen, not measured."""

LOCAL = "local"
"""The address that starts a cluster on this host for one run."""


class WorkerActor(Program):
    """The Ray actor: starts a worker on its node, and passes messages to it. The worker ends with the actor."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            folder = temporary_folder()
            undo.enter_context(folder)
            super().__init__(folder.path / "worker.log", **python("-m", "qdqtune.engines.remote"))
            self.held.push(undo.pop_all())


class ActorProgram:
    """An actor as seen from this process; it has the methods of `process.Worker`."""

    location = ""

    def __init__(self, actor: Any) -> None:
        self._actor, self.alive = actor, True

    def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
        try:
            answer = self._actor.ask.remote(name, arguments, limit)
            wait_for(lambda seconds: ray.wait([answer], timeout=seconds)[0], limit + NETWORK_SECONDS)
            return ray.get(answer)
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, QdqtuneError | TimeoutError):
                raise cause from error
            self.alive = False
            is_lost = isinstance(error, RayActorError)
            raise EOFError("its worker or its node was lost" if is_lost else one_line(cause or error)) from error

    def end(self, seconds: float = 0.0) -> None:
        """End the actor. An idle one removes its files first; else its worker does so when it ends."""
        self.alive = False
        with contextlib.suppress(RayError):
            ray.wait([self._actor.end.remote(seconds)], timeout=seconds)
            ray.kill(self._actor)


@dataclass
class Cluster:
    """The Ray cluster that this process is connected to, for workers with `cores_each` cores each, and a GPU if the
    engine needs one. `start` starts a worker."""

    spec: EngineSpec
    cores_each: int
    started: list[FarWorker] = field(default_factory=list)

    @property
    def _wanted(self) -> str:
        return f"{self.cores_each} CPUs" + (" and a GPU" if needs_gpu(self.spec) else "")

    def capacity(self, cores: int) -> int:
        """How many workers with so many cores the cluster can hold."""
        wanted = {"CPU": cores, **({"GPU": 1} if needs_gpu(self.spec) else {})}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return sum(min(int(has.get(name, 0)) // count for name, count in wanted.items()) for has in nodes)

    def devices(self, workers: int | None, most: int = 0) -> tuple[Device, ...]:
        """Devices for `workers` workers, by default for as many as there is room for. Ray decides where each runs."""
        if most > self.cores_each and not self.capacity(most):
            raise BadOption(f"{most} threads: no node of the cluster has as many CPUs, see ray status")
        fit = self.capacity(self.cores_each)
        if (workers or 1) > fit:
            raise EngineUnavailable(
                f"the cluster has room for {fit} workers of {self._wanted} each, not {workers or 1}: see ray status"
            )
        return tuple(Device(f"worker-{n}", wants=self.cores_each) for n in range(1, 1 + (workers or fit)))

    def start(self, log: Path) -> FarWorker:
        """Start a worker on a node that has room. See `StartWorker`."""
        gpus = 1 if needs_gpu(self.spec) else 0
        wants = {"num_cpus": self.cores_each, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor: Any = ray.remote(WorkerActor).options(**wants).remote()
        try:
            with cancelled_by(self._check_start):
                worker = FarWorker(ActorProgram(actor), WAIT_SECONDS)
        except TimeoutError:
            raise EngineUnavailable(
                f"the cluster has had no node with {self._wanted} to spare for "
                f"{WAIT_SECONDS + NETWORK_SECONDS:.0f} s: give fewer `workers`"
            ) from None
        except EOFError as error:
            raise EngineUnavailable(f"no worker starts on the cluster: {error}") from error
        self.started.append(worker)
        return worker

    def _check_start(self) -> None:
        """Raise TimeoutError if lost nodes leave no room for a worker, EngineUnavailable if our own node is lost."""
        own = ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == own):
            raise EngineUnavailable(NODE_LOST)
        if sum(worker.alive for worker in self.started) >= self.capacity(self.cores_each):
            raise TimeoutError


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at an address; `LOCAL` starts one for the block. Reuses an existing connection."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(Scratch(Path("/tmp"), TEMPORARY))  # the paths of Ray's sockets must be short
        if address == LOCAL:
            quiet |= {"include_dashboard": False, "_temp_dir": str(folder)}
        try:
            stack.callback(ray.shutdown)
            with contextlib.chdir(folder):  # Ray's workers import modules from the current folder
                ray.init(**quiet)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            raise EngineUnavailable(
                f"no Ray cluster answers at {address}: {one_line(error)}; start one with: ray start --head"
            ) from error
        yield

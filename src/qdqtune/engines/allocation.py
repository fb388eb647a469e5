"""Devices for the workers of a run, on this host or on a Ray cluster. All have to be of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import ANYWHERE, Device, allot, cores_for
from qdqtune.engines.process import StartWorker, Worker
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable


@contextmanager
def allocate_workers(
    spec: EngineSpec,
    workers: int | None,
    cores_each: int | None,
    ray: str | None,
    most: int = 0,
    elsewhere: Callable[..., Worker] | None = None,
) -> Iterator[tuple[tuple[Device, ...], StartWorker | None]]:
    """Yield a device for each worker of an engine, and the function that starts a worker on one (None:
    `runner.start_worker`). Workers run on this host; on another machine if `elsewhere` (`Destination.start`) is given;
    or on the Ray cluster at the address `ray`.

    Without `workers` there is one on a host, and on a cluster as many as fit. Each gets `cores_each` cores; at least
    one node of the cluster must have `most` cores.
    """
    if ray is None:
        is_shared = (workers or 1) == 1 and cores_each is None  # a single worker needs no cores of its own
        if elsewhere is not None:
            names = [""] if is_shared else [f"worker-{n + 1}" for n in range(workers or 1)]
            yield tuple(map(Device, names)), partial(elsewhere, cores=cores_for(spec, cores_each))
            return
        yield (ANYWHERE,) if is_shared else allot(spec, workers or 1, cores_each), None
        return
    try:
        from qdqtune.engines import cluster
    except ImportError as error:
        raise EngineUnavailable("`ray` needs Ray, which is not installed: pip install 'qdqtune[ray]'") from error
    with cluster.connected(ray):
        nodes = cluster.Cluster(spec, cores_for(spec, cores_each))
        yield nodes.devices(workers, most), nodes.start


def check_same_kind(runners: Sequence[Runner]) -> None:
    """Start all engines, and refuse devices of different kinds: their latencies cannot be compared."""
    with ThreadPoolExecutor(len(runners)) as threads:
        first, *others = [started.result() for started in [threads.submit(runner.describe) for runner in runners]]
    for runner, other in zip(runners[1:], others, strict=True):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise EngineUnavailable(
                    f"workers are not alike: {runner.location} has {name} {other.get(name)}, {runners[0].location} has "
                    f"{first.get(name)}; latencies compare on equal devices only, so give a run devices of one kind"
                )

"""Where workers are: on this host, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import Device, cores_for, devices_for
from qdqtune.engines.runner import StartWorker
from qdqtune.errors import EngineUnavailable

INSTALL = "pip install 'qdqtune[ray]'"


@dataclass(frozen=True)
class Places:
    """Devices to measure on, and what starts a worker on one; None is as runners do by themselves."""

    devices: tuple[Device, ...]
    start: StartWorker | None = None


@contextmanager
def places_for(
    spec: EngineSpec, workers: int | None, cores_each: int | None, ray: str | None, most: int = 0
) -> Iterator[Places]:
    """Places for so many workers of an engine on this host, or on the Ray cluster at an address; None is one on this
    host, and as many as there is room for on a cluster. One of its nodes has `most` so many cores.

    Raises:
        BadOption: this host has no room for so many, or no node has as many cores.
        EngineUnavailable: Ray is not installed, no cluster answers, or it has no room for so many.
    """
    if ray is None:
        yield Places(devices_for(spec, workers or 1, cores_each))
        return
    try:
        from qdqtune.engines.ray import cluster
    except ImportError as error:
        raise EngineUnavailable(f"--ray needs Ray, which is not installed: {INSTALL}") from error
    with cluster.connected(ray):
        start = cluster.Cluster(spec, cores_for(spec, cores_each)).start
        yield Places(cluster.devices(spec, workers, cores_each, most), start)

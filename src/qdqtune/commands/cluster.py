"""`qdqtune doctor --ray`: the devices of a Ray cluster, and whether a run may use them together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from qdqtune.engines import EngineSpec
from qdqtune.engines.crew import described, unlike
from qdqtune.engines.places import places_for
from qdqtune.engines.runner import Runner


@dataclass(frozen=True)
class ClusterState:
    """What an engine says of itself on each device, by the place of the device; and the first difference, if any."""

    devices: Mapping[str, Mapping[str, str]]
    difference: str | None


def examine_cluster(spec: EngineSpec, address: str, cores_each: int | None, log_dir: Path) -> ClusterState:
    """Start an engine on every device that a cluster has room for.

    Raises:
        EngineUnavailable: no cluster answers, it has no room, or the engine does not start on one of its nodes.
    """
    with ExitStack() as stack:
        places = stack.enter_context(places_for(spec, None, cores_each, address))
        runners = [
            stack.enter_context(Runner(spec, log_dir=log_dir, device=device, start=places.start))
            for device in places.devices
        ]
        told = described(runners)
        where = [runner.place for runner in runners]
        return ClusterState(dict(zip(where, told, strict=True)), unlike(runners, told))

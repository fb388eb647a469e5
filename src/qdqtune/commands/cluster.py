"""`qdqtune doctor --ray`: the devices of a Ray cluster, and whether a run may use them together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from qdqtune.engines import EngineSpec
from qdqtune.engines.allocation import allocate_workers, describe_all, first_difference
from qdqtune.engines.runner import Runner
from qdqtune.options import COUNT, TEXT, MaybeInt, MaybeText, Options, Text, option


@dataclass(kw_only=True)
class DoctorOptions(Options):
    """The options of `doctor`."""

    ray: MaybeText = option(
        TEXT,
        None,
        "Look at the devices of the Ray cluster at this address instead.",
        "Engine",
        metavar="ADDRESS",
        is_rare=True,
    )
    engine: Text = option(TEXT, "onnxruntime", "The engine to start on each of them.", "Engine", metavar="NAME")
    cores_per_worker: MaybeInt = option(
        COUNT, None, "Cores of each of them.", "Engine", default_in_words="1", is_rare=True
    )


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
        allocation = stack.enter_context(allocate_workers(spec, None, cores_each, address))
        runners = [
            stack.enter_context(Runner(spec, log_dir=log_dir, device=device, start=allocation.start))
            for device in allocation.devices
        ]
        told = describe_all(runners)
        where = [runner.location for runner in runners]
        return ClusterState(dict(zip(where, told, strict=True)), first_difference(runners, told))

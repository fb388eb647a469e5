"""Several workloads timed together: rounds and layers of the average call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from qdqtune.types import Layer, Measurement, Mix, Tensors, Workload

Layers = tuple[Layer, ...]


def as_workloads(given: Tensors | Mix) -> Mix:
    """Workloads with shares that add up to 1; inputs by name are a single one."""
    mix = (Workload(given),) if isinstance(given, Mapping) else given
    total = sum(workload.share for workload in mix)
    return tuple(
        Workload({name: np.asarray(array) for name, array in w.inputs.items()}, w.share / total, w.name) for w in mix
    )


def measurement(mix: Mix, rounds: Sequence[Sequence[tuple[float, float]]]) -> Measurement:
    """A measurement of rounds, each of which holds the seconds of both sides, (a, b), for each workload."""
    times = np.array(rounds)  # [rounds, workloads, sides]
    a, b = np.tensordot(times, [workload.share for workload in mix], axes=([1], [0])).T.tolist()
    parts = [Measurement(tuple(x), tuple(y)) for x, y in times.transpose(1, 2, 0).tolist()]
    return Measurement(tuple(a), tuple(b), tuple(parts) if len(parts) > 1 else ())


def average_layers(mix: Mix, reports: Sequence[Layers]) -> Layers:
    """Layers with the times of the average call, from a report for each workload. Where an engine runs different layers
    for different shapes, those of the workload with the largest share of the time are reported, scaled so that they add
    up to the time of the average call."""
    shares = [workload.share for workload in mix]
    names = [[(layer.name, layer.nodes) for layer in report] for report in reports]
    if all(each == names[0] for each in names):
        return tuple(
            replace(together[0], time_ms=_mean([layer.time_ms for layer in together], shares))
            for together in zip(*reports, strict=True)
        )
    spent = [sum(layer.time_ms or 0.0 for layer in report) for report in reports]
    totals = [share * ms for share, ms in zip(shares, spent, strict=True)]
    most = int(np.argmax(totals))
    factor = sum(totals) / spent[most] if spent[most] else 1.0
    told = ((layer, layer.time_ms) for layer in reports[most])
    return tuple(layer if ms is None else replace(layer, time_ms=factor * ms) for layer, ms in told)


def _mean(times: Sequence[float | None], shares: Sequence[float]) -> float | None:
    known = [share * ms for share, ms in zip(shares, times, strict=True) if ms is not None]
    return sum(known) if len(known) == len(times) else None

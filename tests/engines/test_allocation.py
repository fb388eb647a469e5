"""Devices for the workers of a run: one kind only, and Ray where it is asked for."""

import itertools
from pathlib import Path

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.allocation import check_same_kind
from qdqtune.engines.devices import Device
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable
from workers import Workers

KINDS = (EngineSpec("fake"), EngineSpec("fake", {"asymmetric": True}), EngineSpec("fake", {"threads": 2}))


@pytest.mark.parametrize("kinds", [kinds for n in (1, 2, 3) for kinds in itertools.product(range(3), repeat=n)])
def test_devices_of_several_kinds_are_refused_by_name(kinds: tuple[int, ...], tmp_path: Path, workers: Workers) -> None:
    runners = [Runner(KINDS[kind], log_dir=tmp_path, device=Device(f"worker-{n}")) for n, kind in enumerate(kinds, 1)]
    other = next((n for n, kind in enumerate(kinds, 1) if kind != kinds[0]), None)
    if other is None:
        check_same_kind(runners)
    else:
        with pytest.raises(EngineUnavailable, match=rf"worker-{other} has .*, worker-1 has "):
            check_same_kind(runners)
    assert {device.name for device in workers.devices} == {runner.device.name for runner in runners}

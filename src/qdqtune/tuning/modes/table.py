"""The modes by name. A further one is a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qdqtune.tuning.modes import cut, region, subgraph
from qdqtune.tuning.modes.mode import Mode
from qdqtune.tuning.run import Run

MODES: Mapping[str, Callable[[Run], Mode]] = {
    "cut": cut.prepare,
    "region": region.prepare,
    "subgraph": subgraph.prepare,
}

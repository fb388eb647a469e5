"""What tests of fitted numbers share: prepared models, pairs on the inputs of some nodes, and who hears of progress."""

from collections.abc import Callable

from models import Arrays
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import Ranges
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import sqnr_db
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Deaf, Placement


def prepared(net: Model, feeds: list[Arrays]) -> Prepared:
    samples = Samples("test", "", False, lambda: iter(feeds))
    return Prepared(net, net, samples, samples, samples)


def inputs_of(net: Model, *nodes: str) -> Callable[[Ranges], Placement]:
    """Pairs on the inputs of some nodes."""
    return lambda known: Placement.of(e for e in possible_edges(net, known) if e.node in nodes)


class Heard(Deaf):
    """How far each stage was, as it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, list[tuple[int, int | None]]]] = []

    def stage(self, text: str) -> None:
        self.stages.append((text, []))

    def progress(self, done: int, total: int | None) -> None:
        self.stages[-1][1].append((done, total))


def db(exact: list[Arrays], outputs: list[Arrays]) -> float:
    found = sqnr_db(exact, outputs)
    assert found is not None
    return found

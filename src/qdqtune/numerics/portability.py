"""What numbers cost with which a file computes the same on every processor."""

from __future__ import annotations

from dataclasses import replace

from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Ranges
from qdqtune.numerics.closeness import closeness
from qdqtune.numerics.fitting import corrected_for
from qdqtune.numerics.scores import equal_share
from qdqtune.numerics.simulation import Simulation
from qdqtune.placement.insertion import Inserter
from qdqtune.types import Accuracy, NumericFormat, Placement


def cost_of_portable(
    simulation: Simulation, prepared: Prepared, ranges: Ranges, numbers: NumericFormat, placement: Placement
) -> str:
    """The accuracy of a placement with weights of 7 bits beside that with 8 bits: a sentence.

    `ranges` and `numbers` are those of the file with 7 bits; with 8 bits, biases are corrected anew. Both are simulated
    without the engine, so that nothing overflows.
    """
    wide = replace(numbers, reduced_weights=False)
    formats = (ranges, numbers), (corrected_for(prepared, wide, ranges, placement), wide)
    seven, eight = (simulation.accuracy(placement, Inserter(prepared.model, *each)) for each in formats)
    told = "`portable`: weights have 7 bits"
    if not isinstance(seven, Accuracy) or not isinstance(eight, Accuracy):
        return f"{told}; what that costs is not known, as ONNX Runtime cannot run both models"
    here, there = (closeness(one.sqnr_db, equal_share(one)) for one in (seven, eight))
    return f"{told}, outputs {here}; with 8 bits, which overflow on x86 without VNNI, {there} (both simulated)"

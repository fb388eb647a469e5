"""How well cut mode's prices foretell builds that they were not learned from, and what its variables are worth.

Reads the runs that `modes.py --keep` left. For each run of cut mode, prices are learned from the first builds and
foretell the ratio to the float model of the next one. Two ways to choose the variables:

  tensors   a unit runs quantized or not, and each tensor that it writes is stored in 8 bits or not (what cut mode does)
  units     a unit runs quantized or not, and stores all that it writes in 8 bits if it does

The error is |log(foretold / measured)|, in %.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zoo

from qdqtune.graph.loading import load
from qdqtune.placement.possible import possible_edges
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.units import Decision
from qdqtune.search.cut import CutSearch
from qdqtune.tuning.store import RangesRecord, read_journal
from qdqtune.types import Layer, Placement, Trial

WARM_UP = 3
"""Builds besides the float one that price every unit once, before which nothing can be foretold."""


def errors(entry: zoo.Entry, state: Path) -> Iterator[tuple[float, float]]:
    """Error of both ways, for each build of a run but the first ones."""
    model = load(entry.path, fix_inputs=entry.fixed)
    journal = read_journal(state)
    assert journal is not None  # the run has ended
    ranges = journal.get("ranges", RangesRecord)
    assert ranges is not None
    possible = possible_edges(model, ranges.ranges)
    layers = journal.values("layers:", tuple[Layer, ...]).get("", ())
    history = list(journal.values("trial:", Trial).values())
    search = CutSearch(model, possible, layers)
    for known in range(WARM_UP, len(history)):
        measured = ratios_to_float(history[: known + 1], search.plan).get(history[known].placement)
        if measured is not None:
            costs = search.costs(history[:known])
            ways = by_tensors(costs, history[known].placement), by_units(costs, history[known].placement)
            a, b = (100 * abs(float(np.log(ms / search.float_ms / measured))) for ms in ways)
            yield a, b


def by_tensors(costs: Costs, placement: Placement) -> float:
    """The foretold ms with a variable for each tensor."""
    return costs.ms(placement)


def by_units(costs: Costs, placement: Placement) -> float:
    """The foretold ms when all that a quantized unit writes counts as stored."""
    quantized, parts = costs.partition.decision(placement).quantized, costs.partition
    return costs.total(Decision.of(quantized, (t for t in parts.edges if parts.producer.get(t) in quantized)))


def main() -> None:
    arguments: argparse.ArgumentParser = zoo.parser(__doc__, ())
    arguments.add_argument("--keep", type=Path, required=True, help="the folder that modes.py kept its runs in")
    arguments.add_argument("--engine", default="onnxruntime", help="engine of the runs (%(default)s)")
    given = arguments.parse_args()
    rows, every = [], []
    for entry in zoo.find(given.models, given.names):
        state = given.keep / f"{given.engine}_{entry.name}" / "cut" / "autotuner_state.yaml"
        if state.exists() and (found := list(errors(entry, state))):
            every += found
            rows.append([entry.name, str(len(found)), *(f"{e:.1f}" for e in np.median(found, axis=0))])
    zoo.print_table(["model", "builds", "tensors, median %", "units, median %"], rows)
    if every:
        medians, worst = np.median(every, axis=0), np.percentile(every, 90, axis=0)
        print(f"{len(every)} builds: median {medians[0]:.1f} % (tensors), {medians[1]:.1f} % (units); "
              f"90th percentile {worst[0]:.1f} %, {worst[1]:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()

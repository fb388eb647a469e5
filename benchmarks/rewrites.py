"""What each rewrite of the float model gives by itself: time of the rewritten model over that of the one before, both
in float, and both with pairs where the engine's rules place them.

The model before is the user's file in float, and for pairs the one with BatchNormalization folded. Cells are median
ratios of interleaved rounds with their intervals; a rewrite that has nothing to do has no row. `error` is the largest
difference of an output over its largest value.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zoo

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.scales import Calibration
from qdqtune.engines import EngineSpec
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import QdqtuneError
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import REWRITES, folded
from qdqtune.graph.saving import save
from qdqtune.placement import engine_rules
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.timing.pairing import rounds_of
from qdqtune.timing.ratios import Plan, compare, ratio
from qdqtune.types import Failure, Sample

PLAN = Plan((12, 24, 48))
COLUMNS = ("model", "engine", "rewrite", "nodes", "in float", "error", "with pairs")


class Measured:
    """One model on one engine: the files of its forms, each built once."""

    def __init__(self, entry: zoo.Entry, runner: Runner, folder: Path) -> None:
        self._entry, self._runner, self._folder = entry, runner, folder
        self.plain = load(entry.path, fix_inputs=entry.fixed)
        prepared = prepare(self.plain, Data(entry.data, 1), fixed=entry.fixed)
        self._sample: Sample = prepared.samples.first(1)[0]
        runner.feed(self._sample)
        self._given = self.built(self.plain, "given")
        self._paired = self.built(self.with_pairs(folded(self.plain)), "pairs")

    def built(self, model: Model, name: str) -> Handle:
        """A build of a model.

        Raises:
            RuntimeError: the engine refuses it.
        """
        file = self._folder / f"{name}.onnx"
        save(model, file)
        handle = self._runner.load(file, name)
        if isinstance(handle, Failure):
            raise RuntimeError(handle.reason)
        return handle

    def with_pairs(self, model: Model) -> Model:
        """`model` with pairs by the rules of the engine; ranges of one sample do for latency."""
        engine = self._runner.describe()["engine"]
        prepared = prepare(model, Data(self._entry.data, 1), fixed=self._entry.fixed)
        ranges = calibrate(prepared.shaped, prepared.samples.first(1), Calibration("minmax"))
        placed = engine_rules.place(prepared.shaped, possible_edges(prepared.shaped, ranges), engine, "int8")
        return Inserter(model, ranges, numeric_format(engine, "int8")).insert(placed.placement)

    def row(self, name: str) -> list[str]:
        """The cells of a rewrite; none where it has nothing to do."""
        apply = REWRITES[name].apply
        try:
            rewritten = apply(self.plain)
            if rewritten is self.plain:
                return []
            plain = self.built(rewritten, f"{name}_float")
            paired = self.built(self.with_pairs(apply(folded(self.plain))), f"{name}_pairs")
        except (QdqtuneError, RuntimeError) as error:
            return [name, "", str(error)[:60], "", ""]
        nodes = f"{len(self.plain.nodes)} -> {len(rewritten.nodes)}"
        cells = [self._ratio(self._given, plain), self._error(plain), self._ratio(self._paired, paired)]
        for handle in (plain, paired):
            self._runner.unload(handle)
        return [name, nodes, *cells]

    def _ratio(self, before: Handle, after: Handle) -> str:
        measured = compare(rounds_of(self._runner, before, after, PLAN, 0), PLAN)
        return measured.reason if isinstance(measured, Failure) else str(ratio(measured, PLAN))

    def _error(self, after: Handle) -> str:
        outputs = [self._runner.outputs(handle, [self._sample]) for handle in (self._given, after)]
        exact, found = (o[0] for o in outputs if not isinstance(o, Failure))
        worst = max(
            float(np.abs(np.subtract(found[name], values, dtype=np.float64)).max() / (np.abs(values).max() + 1e-30))
            for name, values in exact.items()
        )
        return f"{worst:.0e}"


def main() -> None:
    """Print the table, each row as soon as it is known, too."""
    parser = zoo.parser(__doc__, [])
    parser.add_argument("--engines", nargs="+", default=["onnxruntime", "openvino"])
    parser.add_argument("--rewrites", nargs="+", default=list(REWRITES), choices=list(REWRITES))
    given = parser.parse_args()
    zoo.print_machine()
    rows = []
    for entry in zoo.find(given.models, given.names):
        for engine in given.engines:
            with TemporaryDirectory() as folder, Runner(EngineSpec(engine), log_dir=Path(folder) / "logs") as runner:
                measured = Measured(entry, runner, Path(folder))
                for name in given.rewrites:
                    if cells := measured.row(name):
                        rows.append([entry.name, engine, *cells])
                        print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()

"""Float16 with and without the nodes that stay in float32: output SQNR of the model alone, no pairs in it.

`plain` is the SQNR with every node in float16 that can be, `kept` that with the nodes in float32 whose values leave
float16's range on the samples; `nodes` are how many these are, of how many, `casts` the Cast nodes that the conversion
adds, those of inputs and outputs included. `bfloat16` keeps none. Values are rounded wherever an engine stores them.
"""

from __future__ import annotations

import zoo

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.scales import Calibration
from qdqtune.graph.float16 import OPSET
from qdqtune.graph.loading import load
from qdqtune.numerics.half_precision import HALF_SAMPLES, Half, keeping, lowered
from qdqtune.types import Failure

COLUMNS = ("model", "nodes", "of", "casts", "plain", "kept", "bfloat16")
CALIBRATED = 16


def told(half: Half) -> str:
    if isinstance(half.accuracy, Failure):
        return "NaN or infinite"
    return "exact" if half.accuracy is None or half.accuracy.sqnr_db is None else f"{half.accuracy.sqnr_db:.1f} dB"


def row(entry: zoo.Entry) -> list[str]:
    model = load(entry.path, fix_inputs=entry.fixed, min_opset=OPSET)
    data = prepare(model, Data(entry.data, CALIBRATED), fixed=entry.fixed)
    ranges, samples = calibrate(data.shaped, data.calibration, Calibration()), data.judging[:HALF_SAMPLES]
    plain = keeping(model, "fp16", data.shaped, {}, samples)
    half = lowered(model, "fp16", ranges, data.shaped, samples)
    wide = lowered(model, "bf16", ranges, data.shaped, samples)
    casts = sum(n.op == "Cast" for n in half.model.nodes) - sum(n.op == "Cast" for n in model.nodes)
    return [entry.name, str(len(half.kept)), str(len(model.nodes)), str(casts), *map(told, (plain, half, wide))]


def main() -> None:
    given = zoo.parser(__doc__, ()).parse_args()
    rows = []
    for entry in zoo.find(given.models, given.names):
        rows.append(row(entry))
        print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()

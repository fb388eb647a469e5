"""Whether a float model is the one behind a Q/DQ file: with the pairs of the file it gives the same outputs."""

from __future__ import annotations

import numpy as np

from qdqtune.errors import BadModel
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import accuracy, is_finite
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.numerics.sessions import Session
from qdqtune.placement.reading import dynamic_products_of
from qdqtune.placement.switches import file_pairs, with_file_pairs
from qdqtune.types import Failure, Sample, noise_of, sqnr_of

LEAST_DB = 40.0
"""Both graphs compute the same: only roundings around Casts may differ. Chosen, not measured."""


def check_stripped(stripped: Model, given: Model, session: Session, sample: Sample, name: str, instead: str) -> None:
    """Compare the outputs of `given`, the Q/DQ model of the file `name`, with those of `stripped`, the float model made
    of it, with all pairs put back. `session` runs both without optimization.

    Nothing is compared where ONNX Runtime does not run the file, or gives no equal or no finite outputs twice, or where
    activations are quantized dynamically.

    Raises:
        BadModel: outputs differ; the message ends with what to do `instead`.
    """
    if any(True for _ in dynamic_products_of(given)):
        return
    outputs = session.outputs(given, "given", [sample, sample])
    if isinstance(outputs, Failure) or not is_finite(outputs):
        return
    once, again = outputs
    if not all(np.array_equal(once[output], again[output]) for output in once):
        return
    pairs, unmatched = file_pairs(stripped, given)
    # Constants that the file has as integers stay floats: they are to be the same numbers.
    pairs = tuple(p for p in pairs if any(node.op_type == "QuantizeLinear" for node in p.nodes))
    found = session.outputs(with_file_pairs(stripped, pairs, given), "put_back", [sample])
    if isinstance(found, Failure):
        if found.is_transient:
            return
        how = f"they do not run: {found.reason}"
    else:
        judged = accuracy([once], found, NO_SCORES)
        noise = max(judged.noise, 0.0 if judged.agreement is None else 1 - judged.agreement)
        if is_finite(found) and noise <= noise_of(LEAST_DB):
            return
        how = f"outputs have {sqnr_of(noise):.1f} dB" if is_finite(found) else "outputs are NaN or infinite"
    where = f" (the first without a tensor: {unmatched[0]})" if unmatched else ""
    raise BadModel(
        f"{name} cannot be read as a float model with Q/DQ pairs: with the pairs taken off and put back{where}, {how}; "
        f"{instead}"
    )

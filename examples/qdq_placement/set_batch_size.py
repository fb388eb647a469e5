"""Write a copy of a model for one fixed batch size, and run it once on ONNX Runtime to see that it works.

    python set_batch_size.py model.onnx --batch-size 8 --output model.bs8.onnx

The first dimension of every input counts as the batch, be it open or fixed so far.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import onnx

from qdqtune.calibration.samples import open_samples
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.errors import BadModel, BadOption, EngineFailure, QdqtuneError
from qdqtune.graph.inference import infer
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save


def with_batch(model: Model, size: int) -> Model:
    """`model` with `size` as first dimension of every input that has one, and all other shapes inferred again."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in proto.graph.input:
        for dimension in value.type.tensor_type.shape.dim[:1]:
            dimension.dim_value = size
    return Model(infer(proto, model.large), model.large)


def check(model: Model, size: int, batched: list[str]) -> None:
    """Run the model once, on random inputs.

    Raises:
        BadModel: it does not run, an output that should hold a row for each sample does not, or an input is open in
            other dimensions as well.
    """
    again = "it holds its old batch size elsewhere as well: export it again with a dynamic batch"
    try:
        sample = open_samples(None, model, limit=1).first(1)[0]
    except BadOption as error:
        raise BadModel("an input is open in other dimensions as well: this script fixes the batch only") from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        save(model, file)
        try:
            outputs = open_engine(EngineSpec("onnxruntime")).build(file, Path(folder, "log")).run(sample)
        except EngineFailure as error:
            raise BadModel(f"with this batch size the model does not run ({error}); maybe {again}") from error
    for name in batched:
        if outputs[name].shape[0] != size:
            raise BadModel(f"output {name!r} has {outputs[name].shape[0]} rows, not {size}; {again}")


def main() -> int:
    """Fix the batch size, and return the exit code."""
    options = argparse.ArgumentParser(description="Write a copy of a model for one fixed batch size.")
    options.add_argument("model", type=Path)
    options.add_argument("--batch-size", type=int, required=True, help="samples in one inference")
    options.add_argument("--output", type=Path, required=True, help="file to write")
    given = options.parse_args()
    if given.batch_size < 1 or given.output.resolve() == given.model.resolve():
        options.error("--batch-size is at least 1, and --output another file than the model")
    try:
        model = load(given.model)
        before = {model.tensors[name].shape[:1] for name in model.inputs if model.tensors[name].shape}
        batched = [name for name in model.outputs if (model.tensors[name].shape or ())[:1] in before]
        changed = with_batch(model, given.batch_size)
        check(changed, given.batch_size, batched)
        save(changed, given.output)
    except QdqtuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{given.output}: batch {given.batch_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

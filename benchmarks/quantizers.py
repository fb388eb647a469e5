"""The usual quantizers' own answers: ONNX Runtime's quantize_static, and NNCF's default post-training quantization; and
the outputs of a file.

    python benchmarks/quantizers.py static MODEL SAMPLES TARGET
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineRefused
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.types import Array, NumericFormat, Sample


class Reader(CalibrationDataReader):  # type: ignore[misc]  # the library has no types
    """Samples, handed out one by one."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, Array] | None:
        sample = next(self._left, None)
        return None if sample is None else dict(sample)


def pre_process(plain: Path, prepared: Path) -> None:
    """ONNX Runtime's own preparation for quantize_static, all of it where its symbolic shape inference knows the model.

    It leaves weights that several nodes share behind Identity nodes (1.30), where quantize_static does not see that
    they are weights: they are given to the nodes themselves.
    """
    with chdir(prepared.parent):  # it leaves files in the current folder
        try:
            quant_pre_process(plain, prepared)
        except Exception:  # noqa: BLE001  # nothing narrower is raised for what it does not know
            quant_pre_process(plain, prepared, skip_symbolic_shape=True)
    model = onnx.load(prepared)
    graph = model.graph
    weights, outputs = {each.name for each in graph.initializer}, {each.name for each in graph.output}
    copies = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "Identity" and node.input[0] in weights and node.output[0] not in outputs
    }
    for node in graph.node:
        node.input[:] = [copies[name].input[0] if name in copies else name for name in node.input]
    for copy in copies.values():
        graph.node.remove(copy)
    onnx.save(model, prepared)


def write_static(
    model: Model, samples: Iterable[Sample], numbers: NumericFormat, target: Path, method: str = "MinMax"
) -> None:
    """Write what quantize_static makes of `model`: uint8 activations by one of its methods, int8 weights."""
    with TemporaryDirectory() as folder:
        plain, prepared = Path(folder) / "float.onnx", Path(folder) / "prepared.onnx"
        save(model, plain)
        pre_process(plain, prepared)
        quantize_static(
            prepared, target, Reader(samples), activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            per_channel=numbers.per_channel, reduce_range=numbers.reduced_weights,
            calibrate_method=CalibrationMethod[method],
        )  # fmt: skip


def write_nncf(
    model: Model, samples: Iterable[Sample], _: NumericFormat, target: Path, fast_bias_correction: bool = True
) -> None:
    """Write what NNCF's default post-training quantization makes of `model`, for OpenVINO's CPU plug-in."""
    import nncf

    with TemporaryDirectory() as folder:
        plain = Path(folder) / "float.onnx"
        save(model, plain)
        dataset = nncf.Dataset(list(samples), dict)
        onnx.save(nncf.quantize(onnx.load(plain), dataset, fast_bias_correction=fast_bias_correction), target)


def outputs(file: Path, runner: Runner, samples: Sequence[Sample]) -> list[dict[str, Array]]:
    """The outputs of a file; a benchmark ends where it does not run."""
    try:
        return runner.outputs_of(file, samples)
    except EngineRefused as refused:
        raise SystemExit(f"{file} does not run: {refused}") from refused


PEERS: Mapping[str, Callable[[Model, Samples, NumericFormat, Path], None]] = {
    "static": write_static,
    "nncf": write_nncf,
}
"""How each quantizer writes its file."""

ENGINES: Mapping[str, str] = {"static": "onnxruntime", "nncf": "openvino"}
"""The engine whose numbers each of them uses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", help="as `--calibration-data`")
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    model = load(given.model)
    samples = open_samples(given.samples, model)
    PEERS[given.peer](model, samples, numeric_format(ENGINES[given.peer], "int8"), given.target)


if __name__ == "__main__":
    main()

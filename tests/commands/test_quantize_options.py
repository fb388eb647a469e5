"""The options of `quantize`: each reaches its field."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from qdqtune.calibration.scales import Calibration
from qdqtune.cli import main
from qdqtune.cli.quantize import quantize_command
from qdqtune.commands.quantize import QuantizeOptions

QUANTIZE: dict[str, tuple[Sequence[str], Callable[[QuantizeOptions], object], object]] = {
    "--output": (["x.onnx"], lambda r: r.output, Path("x.onnx")),
    "--quant-type": (["fp8"], lambda r: r.quant_type, "fp8"),
    "--engine": (["openvino"], lambda r: r.engine, "openvino"),
    "--precision": (["fp16"], lambda r: r.precision, "fp16"),
    "--no-per-channel": ([], lambda r: r.per_channel, False),
    "--portable": ([], lambda r: r.portable, True),
    "--nodes-to-quantize": (["a"], lambda r: r.nodes_to_quantize, ("a",)),
    "--op-types-to-quantize": (["Conv"], lambda r: r.op_types_to_quantize, ("Conv",)),
    "--nodes-to-exclude": (["b"], lambda r: r.nodes_to_exclude, ("b",)),
    "--op-types-to-exclude": (["Add"], lambda r: r.op_types_to_exclude, ("Add",)),
    "--calibration-data": (["a:b"], lambda r: r.calibration_data, "a:b"),
    "--calibration-samples": (["7"], lambda r: r.calibration_samples, 7),
    "--input-shape": (["a:1x3"], lambda r: r.input_shapes, {"a": (1, 3)}),
    "--seed": (["5"], lambda r: r.seed, 5),
    "--calibration-method": (["entropy"], lambda r: r.calibration, Calibration("entropy", 99.99, True)),
    "--no-bias-correction": ([], lambda r: r.calibration.bias_correction, False),
    "--rewrites": (["off"], lambda r: r.rewrites, "off"),
    "--calibration-cache": (["c.cache"], lambda r: r.calibration_cache, Path("c.cache")),
    "--placement-like": (["implicit"], lambda r: r.placement_like, "implicit"),
    "--weight-only": (["w4"], lambda r: r.weight_only, "w4"),
    "--fix-input": (["sr=16000"], lambda r: r.fix_inputs, {"sr": 16000}),
    "--evaluate": (["metric:score"], lambda r: r.evaluate, "metric:score"),
    "--labels": (["l.npy"], lambda r: r.label_file, Path("l.npy")),
    "--metric": (["top5:y"], lambda r: r.metric, "top5:y"),
    "--scores": (["y:1", "--scores", "z,w"], lambda r: r.scores, ("y:1", "z", "w")),
    "--report": ([], lambda r: r.report, True),
}
"""Option to values, what to look at in the request, and what is expected there."""


def options_of(*arguments: str) -> QuantizeOptions:
    """The options of `quantize` with these arguments."""
    with main.app.make_context("qdqtune", ["quantize"]) as program:
        given = quantize_command.make_context("quantize", ["m.onnx", *arguments], parent=program).params
    options: QuantizeOptions = given["options"]
    return options


def test_every_option_reaches_its_field_and_every_field_has_one() -> None:
    usual, reached = options_of(), set[str]()
    assert usual == quantize_command.kind(Path("m.onnx"))
    assert usual.target == Path("m.qdq.onnx")
    for option, (values, look, expected) in QUANTIZE.items():
        given = options_of(option, *values)
        assert look(given) == expected != look(usual)
        reached |= {field.name for field in fields(given) if getattr(given, field.name) != getattr(usual, field.name)}
    assert reached == {field.name for field in fields(QuantizeOptions)} - {"model", "time_limit"}
    names = {next(o for o in p.opts if o.startswith("--")) for p in quantize_command.params if p.name != "model"}
    more = {"--json", "--time-limit", "--quiet", "--verbose", "--help-all"}
    assert names == {name.replace("--no-", "--") for name in QUANTIZE} | more

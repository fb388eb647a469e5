"""The options of `quantize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from qdqtune.calibration.options import FixOption
from qdqtune.commands.inputs import METRIC, MetricLike
from qdqtune.commands.source import SourceOptions
from qdqtune.engines.formats import FORMATS
from qdqtune.engines.options import time_limit_option
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model
from qdqtune.numerics.metrics import LabelOptions, ScoreOption
from qdqtune.options import (
    SWITCH,
    TEXT,
    WORDS,
    Anything,
    Duration,
    Flag,
    MaybeText,
    Names,
    Option,
    Text,
    choice,
    option,
)
from qdqtune.tuning.options import portable_option, quant_type_option
from qdqtune.types import Edge, QuantType

Likeness = Literal["rules", "implicit"]


def _wildcards(help: str, metavar: str = "WILDCARD", **how: Any) -> Any:
    return option(WORDS, (), help, "Model", metavar=metavar, is_repeated=True, **how)


@dataclass(kw_only=True)
class QuantizeOptions(LabelOptions, ScoreOption, FixOption, SourceOptions):
    """The options of `quantize`."""

    quant_type: Option[QuantType, QuantType] = quant_type_option("Numbers of the pairs.")
    placement_like: Option[Likeness, Likeness] = option(
        choice("rules", "implicit"),
        "rules",
        "rules: pairs where `engine` gains from them as a rule; implicit: on all that a quantizable layer reads, as "
        "TensorRT's implicit quantization had its scales.",
        "Model",
    )
    per_channel: Option[bool | None, bool | None] = option(
        SWITCH,
        None,
        "A scale for each output channel of an int8 weight.",
        "Model",
        default_in_words="as the engine wants it",
    )
    portable: Flag = portable_option()
    weight_only: MaybeText = option(
        TEXT,
        None,
        "Quantize weights of products and tables alone, activations stay in float: w4 or w8, or exactly w4b32, w4b128a "
        "(blocks of 128, asymmetric) and the like. Language models gain where they read more weights than they "
        "multiply. d8 (d7 on x86 without VNNI) is dynamic quantization: products read activations in 8 bits with a "
        "scale found at run time.",
        "Model",
        short="activations stay in float: w4, w8, w4b32",
        metavar="FORMAT",
    )
    report: Flag = option(
        SWITCH,
        False,
        "What each rule did, and the ten tensors whose rounding alone does most to the outputs. Runs the float model "
        "once or more for each tensor with a pair, up to 400 times in all.",
        "Output",
        short="tensors whose rounding does most harm",
    )
    engine: Text = option(
        choice(*sorted(FORMATS)),
        "onnxruntime",
        "Whose numbers and rules to use. It need not be installed here.",
        "Engine",
        short="whose numbers and rules to use",
    )
    nodes_to_quantize: Names = _wildcards("Only nodes named so. Repeatable.", short="only these nodes")
    op_types_to_quantize: Names = _wildcards("Only these operators. Repeatable.", "OP", short="only these operators")
    nodes_to_exclude: Names = _wildcards(
        "Nodes to keep in float, such as '/head/*'. Repeatable.", short="nodes that stay in float"
    )
    op_types_to_exclude: Names = _wildcards(
        "Operators to keep in float. Repeatable.", "OP", short="operators that stay in float"
    )
    evaluate: Option[MetricLike | None, MetricLike | None] = option(
        Anything(METRIC),
        None,
        "Your metric, called with a function that runs the model: before and after.",
        "Accuracy",
        short="your own function, higher is better",
        metavar="MODULE:CALLABLE",
    )
    time_limit: Duration = time_limit_option()

    @property
    def is_run(self) -> bool:
        """Whether the model is run: with ranges from a file, random inputs would tell nothing."""
        return self.calibration_cache is None or bool(self.calibration_data or self.evaluate or self.is_labelled)

    @property
    def sees_data(self) -> bool:
        """Whether what is written depends on the calibration data."""
        return self.calibration_cache is None and self.weight_only is None

    @property
    def chooses_nodes(self) -> bool:
        """Whether only some of the nodes may be quantized."""
        chosen = self.nodes_to_quantize, self.op_types_to_quantize, self.nodes_to_exclude, self.op_types_to_exclude
        return any(chosen)

    def allowed(self, model: Model, possible: frozenset[Edge]) -> frozenset[Edge]:
        """The edges into nodes that may be quantized, and those to graph outputs.

        Raises:
            BadOption: a wildcard or an operator fits no node.
        """
        chosen = _matching(model, self.nodes_to_quantize, self.op_types_to_quantize)
        excluded = _matching(model, self.nodes_to_exclude, self.op_types_to_exclude)
        allowed = (chosen or {node.name for node in model.nodes}) - excluded
        return frozenset(edge for edge in possible if not edge.node or edge.node in allowed)


def _matching(model: Model, wildcards: Sequence[str], op_types: Sequence[str]) -> set[str]:
    """The names of nodes that fit a wildcard or an operator."""
    names: set[str] = set()
    for wildcard in wildcards:
        matching = {n.name for n in model.nodes if fnmatchcase(n.name, wildcard)}
        if not matching:
            raise BadOption(f"no node is named {wildcard!r}: see qdqtune inspect --verbose for the names")
        names |= matching
    for op in op_types:
        matching = {n.name for n in model.nodes if n.op == op}
        if not matching:
            raise BadOption(f"the model has no {op}; it has {', '.join(sorted({n.op for n in model.nodes}))}")
        names |= matching
    return names

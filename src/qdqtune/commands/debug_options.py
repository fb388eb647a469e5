"""The options of `debug`, and what it is told by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qdqtune.calibration.options import DataOptions, FixOption, samples_option
from qdqtune.calibration.prepare import Data
from qdqtune.commands.inputs import MODEL, ModelLike, ModelOption, SamplesLike
from qdqtune.commands.source import data_of
from qdqtune.engines import EngineSpec
from qdqtune.engines.options import EngineOptions
from qdqtune.engines.runner import TIME_LIMIT
from qdqtune.options import Anything, Number, Option, option

LIMIT = 20.0
"""Output SQNR in dB from which on a quantized model is healthy."""

FLOAT_LIMIT = 30.0
"""That of a float model: engines that compute in 16 bits reach more."""


@dataclass(kw_only=True)
class DebugOptions(EngineOptions, DataOptions, FixOption, ModelOption):
    """The options of `debug`."""

    quantized: Option[ModelLike | None, ModelLike | None] = option(
        Anything(MODEL), None, "The quantized model.", is_positional=True, metavar="[QUANTIZED]"
    )
    min_sqnr: Option[float | None, float | None] = option(
        Number(),
        None,
        "Output SQNR from which on the outputs count as healthy, in dB; 20 is an error of a tenth.",
        "Accuracy",
        short="least signal to error at the outputs",
        default_in_words=f"{LIMIT:g}; {FLOAT_LIMIT:g} for a float model alone",
        metavar="DB",
    )
    calibration_data: Option[SamplesLike | None, SamplesLike | None] = samples_option()

    def request(self) -> Request:
        """What `debug` is told. Models and samples lie in files (see `on_disk`)."""
        return Request(
            Path(str(self.model)),
            None if self.quantized is None else Path(str(self.quantized)),
            self.spec(self.input_shapes),
            self.min_sqnr,
            data_of(self, *(None if file is None else Path(str(file)) for file in (self.quantized, self.model))),
            self.fix_inputs,
            self.time_limit,
        )


@dataclass(frozen=True)
class Request:
    """All that `debug` is told. Outputs are healthy from `min_sqnr` dB on (None: `LIMIT`, or `FLOAT_LIMIT`).

    `model` alone may be float or quantized.
    """

    model: Path
    quantized: Path | None = None
    engine: EngineSpec = field(default_factory=lambda: EngineSpec("onnxruntime"))
    min_sqnr: float | None = None
    data: Data = field(default_factory=Data)
    fix_inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    time_limit_s: float = TIME_LIMIT

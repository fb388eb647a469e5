"""Options of ONNX Runtime, readable without its library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from qdqtune.engines import CPU_PROVIDER
from qdqtune.errors import BadOption


@dataclass(frozen=True)
class OnnxRuntimeOptions:
    """Options of ONNX Runtime.

    Many CPUs take a hundred times as long for numbers below 1.2e-38, and a pair rounds them to zero, so that a
    quantized model would be faster for this reason alone: `denormals_as_zero` takes that away. It is set for the
    threads that a session starts; for the thread that makes it, only the first session of a process counts.

    Without `fuse` each operator runs exactly as the file has it: that shows what pairs do to the values, not to the
    speed. `rewrite` moves pairs, and rounds weights between them.
    """

    threads: Annotated[int, "CPU threads"] = 1
    provider: Annotated[str, "execution provider, by ONNX Runtime's name"] = CPU_PROVIDER
    fuse: Annotated[bool, "fuse operators"] = True
    fuse_pairs: Annotated[bool, "fuse Q/DQ pairs with operators"] = True
    denormals_as_zero: Annotated[bool, "take denormal numbers as zero"] = True
    rewrite: Annotated[bool, "without fuse: let ONNX Runtime rewrite the graph first"] = False
    provider_options: Annotated[Mapping[str, str] | None, "options of the provider, beside its usual ones"] = None
    library: Annotated[str, "file of the plug-in that brings the provider, in place of its package's"] = ""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise BadOption(f"`threads` must be a whole number from 1 on, not {self.threads}")

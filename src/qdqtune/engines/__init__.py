"""What an engine is, and how one is opened by name.

An engine turns a model file into something that runs, and says how long it takes. Engines crash and hang, so the rest
of the package reaches them through `qdqtune.engines.runner.Runner`, which keeps them in a process of their own. Vendor
libraries are imported by the engine's own module, and that module when the engine is opened.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, QdqtuneError, one_line
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors

MODULES = {
    "fake": "qdqtune.engines.fake",
    "onnxruntime": "qdqtune.engines.onnxruntime.engine",
    "openvino": "qdqtune.engines.openvino.engine",
    "tensorrt": "qdqtune.engines.tensorrt.api",
    "tensorrt-rtx": "qdqtune.engines.tensorrt.rtx",
    "trtexec": "qdqtune.engines.tensorrt.trtexec",
}
"""Engine name to the module whose `create(**options)` makes it."""


@dataclass(frozen=True)
class EngineSpec:
    """The name of an engine and its options, which have JSON values: all that is needed to open it in any process."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Built(Protocol):
    """A model that is built and loaded, ready to run."""

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """One inference: every graph output by name. Arrays that are no input of the model are ignored.

        Raises:
            EngineFailure: the engine cannot run the model on these inputs.
        """

    def time(self, inputs: Tensors, runs: int) -> float:
        """Seconds per inference over `runs` back-to-back inferences. Moving inputs to the device is not counted.

        Raises:
            EngineFailure: the engine cannot run the model on these inputs.
        """

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """What the engine made of the model, in the order in which it runs, with the usual time in `runs` inferences.

        `Layer.nodes` are names of nodes of the model file: the layers together hold each of them once. A node that the
        engine fused is in the layer that absorbed it; nodes that it computed in advance are in one last layer of kind
        "folded". Times are of profiled inferences: they show where time is spent, and do not add up to `time`.

        Raises:
            EngineFailure: the engine cannot run the model on these inputs, or has no such report.
        """

    def save(self, path: Path) -> None:
        """Write the built model in the engine's own format, and load what was written, where that can run here.

        Raises:
            EngineFailure: the engine has no such format, cannot write the file, or does not load it.
        """

    def close(self) -> None:
        """Free the model. It cannot be used afterwards."""


class Engine(Protocol):
    """Something that builds ONNX models and runs them."""

    def describe(self) -> dict[str, str]:
        """Name, version, device, threads and whatever else two latencies must share to be comparable."""

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """How the engine wants quantized numbers.

        Raises:
            BadOption: the engine has no kernels for that type.
        """

    def build(self, model: Path, log: Path) -> Built:
        """Make the model in a file ready to run. Everything that the engine prints goes to the file `log`.

        Raises:
            EngineFailure: the engine refuses the model; the message is its own words, in one line.
        """


TENSORRT_FAMILY = frozenset({"tensorrt", "tensorrt-rtx", "trtexec"})
"""Engines of NVIDIA's: they run on its GPUs, build for given input sizes, and usually start from a float16 model."""


class Compiler(Engine, Protocol):
    """An engine whose builds have two steps: `compile` takes long, may run in another process without disturbing what
    is timed here, and writes a plan; `load` reads the plan. Both raise what `build` does. The option `builds_aside`
    says how many may compile at once."""

    def compile(self, model: Path, log: Path, plan: Path) -> None:
        """Write the plan of a model to the file `plan`."""

    def load(self, plan: Path, model: Path, log: Path) -> Built:
        """Make the plan of a model ready to run."""


THREADED = frozenset({"onnxruntime", "openvino"})
"""Engines that compute on threads of the CPU, unless an execution provider is set that computes elsewhere."""

CPU_PROVIDER = "CPUExecutionProvider"


def threads_of(spec: EngineSpec) -> int | None:
    """How many threads of the CPU an engine computes on; None if it does not, or is not told a number."""
    if spec.name not in THREADED:
        return spec.options.get("threads")
    is_cpu = (spec.options.get("provider") or CPU_PROVIDER) == CPU_PROVIDER
    return int(spec.options.get("threads", 1)) if is_cpu else None


def open_engine(spec: EngineSpec) -> Engine:
    """The engine that `spec` describes.

    Raises:
        BadOption: no engine has that name, or the engine does not take these options, or not these values.
        EngineUnavailable: its library, driver or device is missing.
    """
    if spec.name not in MODULES:
        raise BadOption(f"unknown engine {spec.name!r}; there are {', '.join(sorted(MODULES))}")
    try:
        create: Callable[..., Engine] = importlib.import_module(MODULES[spec.name]).create
    except ImportError as error:
        raise EngineUnavailable(f"engine {spec.name!r} cannot be loaded: {one_line(error)}") from error
    known = [p.name for p in inspect.signature(create).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if unknown := sorted(set(spec.options) - set(known)):
        raise BadOption(f"engine {spec.name!r} has no option {unknown[0]!r}; it has {', '.join(known)}")
    hints = get_type_hints(create)
    for name, value in spec.options.items():
        if not _fits(value, hints[name]):
            raise BadOption(f"option {name!r} of engine {spec.name!r} is {_told(hints[name])}, not {value!r}")
    return create(**spec.options)


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is of the type that the annotation of an option says."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind is UnionType:
        return any(_fits(value, one) for one in inner)
    if kind is Mapping:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if kind is Sequence:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _told(hint: Any) -> str:
    """A type for people."""
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Mapping: "a JSON object",
        Sequence: "a JSON list",
        type(None): "null",
    }
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return " or ".join(names.get(get_origin(kind) or kind, str(kind)) for kind in kinds)


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send everything that this process prints, native libraries included, to the new file `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    try:
        with log.open("wb") as file:
            for fd, _ in saved:
                os.dup2(file.fileno(), fd)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)


@contextmanager
def translated(vendor: str, noise: re.Pattern[str]) -> Iterator[None]:
    """Turn what a vendor's library raises into an EngineFailure, with `noise` removed from the message.

    The whole message goes to standard error, beside the library's own output.
    """
    try:
        yield
    except QdqtuneError:
        raise
    except Exception as error:  # the errors of these libraries share no base class but Exception
        os.write(2, f"{error}\n".encode())
        raise EngineFailure(f"{vendor}: {one_line(noise.sub('', one_line(error, limit=10_000)))}") from error

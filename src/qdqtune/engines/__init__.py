"""What an engine is, and how one is opened by name.

An engine builds a model file, runs it, and says how long that takes. Engines crash and hang, so the rest of the package
uses them through `qdqtune.engines.runner.Runner`, which keeps them in a process of their own. Only an engine's own
module imports the vendor's library, and that module is imported when the engine is opened.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints

import msgspec

from qdqtune.engines.facts import EngineFacts, facts_of, facts_of_provider
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, QdqtuneError, one_line
from qdqtune.types import Array, Layer, Mix, NumericFormat, QuantType, Tensors


@dataclass(frozen=True)
class EngineSpec:
    """The name of an engine and its options, which are JSON values: all that is needed to open it in any process."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> EngineFacts:
        """The record (`engines.facts`) of the engine, or of the execution provider that ONNX Runtime uses."""
        facts, ep = facts_of(self.name), self.options.get("provider")
        return facts_of_provider(str(ep)) if facts.ep and ep else facts


class Built(Protocol):
    """A model that is built and loaded, ready to run. Where the engine cannot run it on some inputs, or has no report
    of its layers, the methods raise EngineFailure."""

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """One inference: every graph output by name. Arrays that the model has no input for are ignored."""

    def time(self, inputs: Tensors, runs: int) -> float:
        """Seconds per inference over `runs` back-to-back inferences. Copying inputs to the device is not timed."""

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """The layers that the engine made of the model, in the order in which they run, with times from `runs` profiled
        inferences. These show where time is spent; they do not add up to `time`.

        `Layer.nodes` are names of nodes of the model file. Each node is in one layer: a fused node in the layer that
        absorbed it, and nodes that were computed in advance in one last layer of kind "folded".
        """

    def save(self, path: Path) -> None:
        """Write the built model in the engine's own format, and load the file if it can run here.

        Raises:
            EngineFailure: the engine has no format of its own, cannot write the file, or does not load it.
            OSError: the system cannot write the file.
        """

    def close(self) -> None:
        """Free the model, which cannot be used afterwards."""


class Launched(Built, Protocol):
    """A model that starts a process for each call. Its `time` runs the model at least `runs` times, warmed up."""

    def time_and_keep(self, inputs: Tensors, runs: int) -> float:
        """Like `time`, and keep the outputs for the next `run` on the same inputs."""


class Engine(Protocol):
    """Something that builds ONNX models and runs them."""

    def describe(self) -> dict[str, str]:
        """Name, version, device, threads, and all else that must be equal for latencies to be comparable."""

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """The number types of Q/DQ pairs for which the engine has fast kernels."""

    def build(self, model: Path, log: Path) -> Built:
        """Build the model in a file. All that the engine prints goes to the file `log`.

        Raises:
            EngineFailure: the engine refuses the model; the message quotes it, in one line.
        """


def normal(spec: EngineSpec) -> EngineSpec:
    """`spec` under the engine's name in files and messages: ONNX Runtime with a known execution provider is an engine
    of its own (qnn, cuda ...), and the CPU provider is not named."""
    facts = spec.facts
    if not facts.ep:
        return spec
    known = {} if facts.unwatched else {"provider": facts.ep}
    return EngineSpec(facts.name, dict(item for item in spec.options.items() if item not in known.items()))


def threads_of(spec: EngineSpec) -> int | None:
    """The CPU threads that one inference uses; None if the engine runs elsewhere, or the number is not known."""
    threads = spec.options.get("threads", 1 if spec.facts.is_threaded else None)
    if threads is not None and not isinstance(threads, int):
        raise BadOption(f"option 'threads' of engine {spec.name!r} wants a whole number, not {threads!r}")
    return threads if spec.facts.is_threaded or not spec.facts.ep else None


def builds_for(mix: Mix) -> int:
    """How many builds of one model file these workloads need: one for each number of threads."""
    return len({workload.threads for workload in mix}) or 1


def open_engine(spec: EngineSpec) -> Engine:
    """Load an engine into this process, which is a worker. Raises BadOption or EngineUnavailable."""
    spec = normal(spec)
    facts = spec.facts
    try:
        create: Callable[..., Engine] = importlib.import_module(facts.module).create
        kind = get_type_hints(create)["options"]
        own = {"provider": facts.ep} if facts.ep else {}
        hints = get_type_hints(kind)
        for name, value in sorted(spec.options.items()):
            if name not in hints:
                raise BadOption(f"engine {spec.name!r} has no option {name!r}; it has {', '.join(hints)}")
            if get_origin(hints[name]) is Literal and value not in get_args(hints[name]):
                able = ", ".join(get_args(hints[name]))
                raise BadOption(f"engine {spec.name!r} has no {name} {value!r}; it has {able}")
        return create(msgspec.convert({**own, **spec.options}, kind))
    except msgspec.ValidationError as error:
        raise BadOption(f"options of engine {spec.name!r}: {one_line(error)}") from error
    except (ImportError, OSError) as error:
        remedy = f": {facts.install}" if facts.install else ""
        raise EngineUnavailable(f"engine {spec.name!r} cannot be loaded ({one_line(error)}){remedy}") from error


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send all that this process prints, native libraries included, to the new file `log`."""
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
def translated(vendor: str, rewords: Mapping[re.Pattern[str], str]) -> Iterator[None]:
    """Turn exceptions of a vendor's library into EngineFailure, with one line of text; the whole message goes to
    standard error. `rewords` replaces parts of messages that match its patterns."""
    try:
        yield
    except QdqtuneError:
        raise
    except Exception as error:  # the errors of these libraries share no base class but Exception
        os.write(2, f"{error}\n".encode())
        text = one_line(error, limit=10_000)
        for theirs, ours in rewords.items():
            text = theirs.sub(ours, text)
        raise EngineFailure(f"{vendor}: {one_line(text)}") from error

"""The process of an engine whose latencies are the fake engine's, so that whole runs repeat: started as workers are.

At the step that the variable KILLED_AT names (a number of the file STEPS counts, over all processes) it ends at once.
"""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from qdqtune.engines import Built, Engine, EngineSpec, open_engine, worker
from qdqtune.types import Layer, NumericFormat, QuantType, Tensors


def step(name: str) -> None:
    """Count a step; end here if this is the one."""
    steps = Path(os.environ["STEPS"])
    with steps.open("a") as file:
        file.write(f"{name}\n")
    if len(steps.read_text().splitlines()) == int(os.environ.get("KILLED_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Steady:
    """An engine that runs models, and says of them what the fake engine says."""

    real: Engine
    fake: Engine

    def describe(self) -> dict[str, str]:
        return self.real.describe()

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return self.real.numeric_format(quant_type)

    def build(self, model: Path, log: Path) -> Built:
        step("build")
        return SteadyModel(self.real.build(model, log), partial(self.fake.build, model, log))


@dataclass(frozen=True)
class SteadyModel:
    """See `Steady`."""

    real: Built
    build: Callable[[], Built]

    @cached_property
    def fake(self) -> Built:
        """Built when somebody asks for times: what only runs may be of types that the fake engine does not know."""
        return self.build()

    def run(self, inputs: Tensors) -> Mapping[str, Any]:
        step("run")
        return self.real.run(inputs)

    def time(self, inputs: Tensors, runs: int) -> float:
        self.real.time(inputs, 1)
        return self.fake.time(inputs, runs)

    def layers(self, inputs: Tensors, runs: int, *, saves_memory: bool = False) -> tuple[Layer, ...]:
        step("layers")
        self.real.layers(inputs, 1)
        return self.fake.layers(inputs, runs)

    def save(self, path: Path) -> None:
        self.real.save(path)

    def close(self) -> None:
        self.real.close()


def opened(spec: EngineSpec) -> Engine:
    """The engine of a spec, steady."""
    return Steady(open_engine(spec), open_engine(EngineSpec("fake")))


if __name__ == "__main__":
    session = worker.Session
    worker.Session = lambda spec: session(spec, opened)  # type: ignore[assignment,misc]
    worker.main()

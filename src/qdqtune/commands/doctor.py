"""`qdqtune doctor`: the engines of this machine or another one, its hardware, and what to install."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qdqtune.commands.shown import Shown, Table
from qdqtune.engines import EngineSpec, devices
from qdqtune.engines.devices import nvidia_smi
from qdqtune.engines.execution import Execution
from qdqtune.engines.facts import ENGINES, PROVIDERS, facts_of
from qdqtune.engines.machine import (
    DOT_PRODUCTS,
    architecture,
    instruction_sets,
    lacks_dot_products,
    processor_name,
    simulated,
)
from qdqtune.engines.options import ON, EngineOptions
from qdqtune.engines.remote import Destination
from qdqtune.engines.runner import temporary_runner
from qdqtune.errors import EngineUnavailable, QdqtuneError
from qdqtune.explanation.formatting import counted
from qdqtune.options import SWITCH

OPENING_SECONDS = 120.0
"""How long an engine may take to open. Chosen, not measured."""


class DoctorOptions(EngineOptions):
    qualify: bool = SWITCH(
        "Check what qdqtune claims of `engine`, on small graphs of its own: builds, layers, 8 bits and outputs. With "
        "--json, to send with a report.",
        "Engine",
        "check what we claim of the engine",
    )
    on: str | None = ON


@dataclass(frozen=True)
class EngineState:
    """Whether an engine runs models here, simulates that, only builds them, or nothing; why, and what to install."""

    name: str
    status: Literal["usable", "simulated", "builds only", "missing"]
    version: str = ""
    device: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Processor:
    name: str
    cores: int
    isa: tuple[str, ...]
    consequence: str


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    compute_capability: str
    memory: str


@dataclass(frozen=True, repr=False)
class EnginesState(Shown):
    """The engines and execution providers, and the hardware of this machine. `gpu_note` says why no GPU was found."""

    engines: tuple[EngineState, ...]
    processor: Processor
    gpus: tuple[Gpu, ...]
    gpu_note: str
    providers: tuple[EngineState, ...] = ()

    @property
    def exit_code(self) -> int:
        is_usable = any(e.status != "missing" for e in self.engines if not facts_of(e.name).is_modelled)
        return 0 if is_usable else EngineUnavailable.exit_code

    def in_words(self) -> str:
        return f"engines here: {', '.join(e.name for e in self.engines if e.status != 'missing')}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> Iterator[str | Table]:
        for kind, states in (("engine", self.engines), ("provider", self.providers)):
            rows = [(e.name, e.status, e.version, e.device) for e in states]
            yield Table((kind, "status", "version", "device"), rows)
        cpu = self.processor
        cores = counted(cpu.cores, "core")
        yield f"CPU: {cpu.name}, {cores} ({' '.join(cpu.isa) or 'no known instruction sets'}); {cpu.consequence}"
        for gpu in self.gpus:
            yield f"GPU: {gpu.name}, {gpu.memory}, compute capability {gpu.compute_capability}, driver {gpu.driver}"
        if self.gpu_note:
            yield f"GPU: none ({self.gpu_note})"
        for engine in (*self.engines, *self.providers):
            if engine.reason:
                yield f"{engine.name}: " + ": ".join(filter(None, (engine.reason, engine.remedy)))


def examine() -> EnginesState:
    """Try to open every engine, each in its own process, and read the hardware. Failures are part of the result."""
    gpus, note = find_gpus()
    engines = tuple(engine_state(name) for name in ENGINES if name not in PROVIDERS)
    isa = instruction_sets()
    follows = consequence(platform.machine(), isa, is_slow=lacks_dot_products())
    processor = Processor(processor_name(), devices.usable_cores(), isa, follows)
    return EnginesState(engines, processor, gpus, note, tuple(map(engine_state, PROVIDERS)))


def doctor_elsewhere(on: str, *flags: str) -> int:
    """Run `doctor` on the remote machine that the option `on` names, print its output, and return its exit code."""
    destination = Destination.parsed(on)
    destination.facts()  # which says in one line what is missing
    words = destination.command(" ".join(("qdqtune doctor", *flags)))
    code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stdout.fileno(), check=False).returncode
    if code not in (0, EngineUnavailable.exit_code):
        raise EngineUnavailable(f"qdqtune doctor on {destination.host} fails with exit code {code}")
    return code


def engine_state(name: str) -> EngineState:
    """Open an engine or execution provider with default options; if that fails, try to build for an absent device."""
    facts = facts_of(name)
    if not all(map(importlib.util.find_spec, facts.packages)):
        return EngineState(name, "missing", reason="not installed", remedy=facts.install)
    try:
        described = _described(EngineSpec(name))
        version = described.get("plugin", described["version"])
        return EngineState(name, "simulated" if simulated(name) else "usable", version, described["device"])
    except QdqtuneError as error:
        reason = str(error)
    if facts.ahead_of_time:
        with contextlib.suppress(QdqtuneError):
            described = _described(EngineSpec(name, facts.ahead_of_time))
            return EngineState(name, "builds only", described["version"], described["device"], reason)
    return EngineState(name, "missing", reason=reason)


def _described(spec: EngineSpec) -> dict[str, str]:
    with temporary_runner(spec, Execution(OPENING_SECONDS)) as runner:
        return runner.describe()


def consequence(machine: str, isa: Collection[str], *, is_slow: bool = False) -> str:
    is_arm = architecture(machine) == "ARM"
    if is_slow:
        return "no ASIMDDP: onnxruntime gets int8 activations, and int8 gains are moderate"
    if not isa:
        return "no instruction set that is known to matter: only a measurement tells what int8 gains"
    if "i8mm" in isa or "amx_int8" in isa:
        return f"{'I8MM' if is_arm else 'AMX'}: int8 matrix products in hardware, int8 gains most here"
    if is_arm or DOT_PRODUCTS & set(isa):
        return f"{'ASIMDDP' if is_arm else 'VNNI'}: int8 dot products in hardware, int8 gains much"
    return "no VNNI: weights take 7 bits, for sums of two 8-bit products saturate, and int8 gains are moderate"


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    rows, reason = nvidia_smi("name,driver_version,compute_cap,memory.total")
    return tuple(Gpu(*row) for row in rows), reason

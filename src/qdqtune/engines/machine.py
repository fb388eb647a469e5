"""The machine that measures, this one or another: its processor, and whether times measured there mean anything."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qdqtune.engines.devices import physical_cores, usable_cores
from qdqtune.engines.facts import facts_of

Architecture = Literal["x86", "ARM", ""]

ARCHITECTURES: Mapping[str, Architecture] = {"x86_64": "x86", "amd64": "x86", "aarch64": "ARM", "arm64": "ARM"}
"""Architectures by the name of a machine, in lower case, as `platform.machine` gives it."""

INSTRUCTION_SETS: Mapping[Architecture, tuple[str, ...]] = {
    "x86": ("avx2", "avx512_vnni", "avx_vnni", "amx_int8"),
    "ARM": ("asimddp", "i8mm", "sme"),
}
"""Instruction sets that decide which integer kernels run, as /proc/cpuinfo names them."""

DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Instruction sets of x86 that add products of 8-bit values into 32 bits."""

CPUINFO = Path("/proc/cpuinfo")


def architecture(machine: str | None = None) -> Architecture:
    """The architecture of a machine name (None: this machine's); "" if it is not in `ARCHITECTURES`."""
    return ARCHITECTURES.get((machine or platform.machine()).lower(), "")


def processor_name() -> str:
    return _cpuinfo_field("model name") or platform.processor() or platform.machine()


def instruction_sets() -> tuple[str, ...]:
    """The processor's sets among `INSTRUCTION_SETS`; none under an emulator that shows those of its host."""
    flags = _cpuinfo_field("flags", "Features").split()
    return tuple(name for name in INSTRUCTION_SETS.get(architecture(), ()) if name in flags)


def products_saturate() -> bool:
    """Whether a sum of two uint8 x int8 products can saturate: on x86 without `DOT_PRODUCTS`, or if unknown."""
    return architecture() != "ARM" and not DOT_PRODUCTS.intersection(instruction_sets())


def lacks_dot_products() -> bool:
    """Whether this is an ARM processor without dot products of 8-bit values (Cortex-A53, A57, A72, A73). False if
    nothing is known of it, as on macOS, where all processors have them."""
    features = _cpuinfo_field("Features").split()
    return architecture() == "ARM" and bool(features) and "asimddp" not in features


def consequence(machine: str, isa: Collection[str]) -> str:
    """What users can expect of 8 bits on a machine with these instruction sets."""
    is_arm = architecture(machine) == "ARM"
    if lacks_dot_products():
        return "no ASIMDDP: onnxruntime gets int8 activations, and int8 gains are moderate"
    if not isa:
        return "no instruction set that is known to matter: only a measurement tells what int8 gains"
    if "i8mm" in isa or "amx_int8" in isa:
        return f"{'I8MM' if is_arm else 'AMX'}: int8 matrix products in hardware, int8 gains most here"
    if is_arm or DOT_PRODUCTS & set(isa):
        return f"{'ASIMDDP' if is_arm else 'VNNI'}: int8 dot products in hardware, int8 gains much"
    return "no VNNI: weights take 7 bits, for sums of two 8-bit products saturate, and int8 gains are moderate"


def _cpuinfo_field(*names: str) -> str:
    """The value of the first line in /proc/cpuinfo with one of these names; "" if there is none."""
    try:
        text = CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return ""
    line = re.search(rf"^(?:{'|'.join(names)})\s*:\s*(.*)$", text, re.MULTILINE)
    return line[1].strip() if line else ""


@dataclass(frozen=True)
class MachineFacts:
    """What is known of a machine: logical cores that the process may use, all that there are, physical cores,
    `platform.machine`, whether 8-bit products saturate, the system, the load average, and `where`: the user's name for
    it, "" for this machine."""

    cores: int
    all_cores: int
    physical_cores: int
    machine: str
    products_saturate: bool
    system: str
    load: float
    where: str = ""

    @property
    def place(self) -> str:
        return f"on {self.where}" if self.where else "here"

    def usual_threads(self, most: int | None = None) -> int:
        """The default number of threads of an engine: one for each physical core that the process may use, at most
        `most`. (ONNX Runtime would count all cores of the machine, also where the process is pinned to fewer.)"""
        return min(self.physical_cores, most or self.physical_cores)


def this_machine() -> MachineFacts:
    return MachineFacts(
        cores=usable_cores(),
        all_cores=os.cpu_count() or 1,
        physical_cores=len(physical_cores()),
        machine=platform.machine(),
        products_saturate=products_saturate(),
        system=platform.platform(),
        load=round(os.getloadavg()[0], 2),
    )


def simulated(name: str, machine: MachineFacts | None = None) -> str:
    """A message if the engine is a simulator on a machine (None: this one), so that times mean nothing; else ""."""
    there = machine or this_machine()
    if there.machine not in facts_of(name).simulated_on:
        return ""
    return f"{name} is a simulator on {there.where or 'this machine'}, whose times mean nothing"

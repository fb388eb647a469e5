"""What a run has to know of the machine that measures, where that is another one than it runs on itself."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from qdqtune.engines import processor
from qdqtune.engines.devices import physical_cores, usable_cores
from qdqtune.system.operating_system import load


@dataclass(frozen=True)
class MachineFacts:
    """A machine: the cores that a process may use, physical ones, its architecture as `platform.machine` names it,
    whether products of 8 bits overflow there, that it is emulated (in words, "" if not), its system, and how many
    processes wanted its cores. `where` names it in messages; "" is this machine."""

    cores: int
    physical_cores: int
    machine: str
    products_saturate: bool
    emulation: str
    system: str
    load: float | None
    where: str = ""


def name_of(machine: MachineFacts | None) -> str | None:
    """The architecture of a machine, as `platform.machine` names it; None for this one."""
    return None if machine is None else machine.machine


def this_machine() -> MachineFacts:
    """The machine that this process runs on."""
    return MachineFacts(
        cores=usable_cores(),
        physical_cores=len(physical_cores()),
        machine=platform.machine(),
        products_saturate=processor.products_saturate(),
        emulation=processor.emulation(),
        system=platform.platform(),
        load=load(),
    )

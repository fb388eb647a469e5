"""What a run has to know of the machine that measures: this one or another, and whether its times mean anything."""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from qdqtune.engines import processor
from qdqtune.engines.devices import load, physical_cores, usable_cores
from qdqtune.engines.providers import PROVIDERS, Provider

COST_MODEL = "fake"
"""The engine whose times come from a cost model, on every processor."""


@dataclass(frozen=True)
class MachineFacts:
    """A machine: the cores that a process may use, physical ones, its architecture as `platform.machine` names it,
    whether products of 8 bits overflow there, that it is emulated (in words, "" if not), its system, how many processes
    wanted its cores, and what it calls itself. `where` is how the user names it, for messages; "" is this machine."""

    cores: int
    physical_cores: int
    machine: str
    products_saturate: bool
    emulation: str
    system: str
    load: float | None
    name: str
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
        name=_own_name(),
    )


def _own_name() -> str:
    """The host name, and where the system has an id of its own, a digest of that: new boards share a host name."""
    with suppress(OSError):
        return f"{gethostname()} {hashlib.sha256(Path('/etc/machine-id').read_bytes()).hexdigest()[:8]}"
    return gethostname()


def is_simulated(name: str, machine: MachineFacts | None = None) -> bool:
    """Whether times of this engine mean nothing on a machine (None: this one): it is a simulator there, or the
    processor is emulated."""
    kind, emulated = (machine.machine, machine.emulation) if machine else (platform.machine(), processor.emulation())
    is_simulator = name in PROVIDERS and kind in PROVIDERS[name].simulated_on
    return is_simulator or (name != COST_MODEL and bool(emulated))


def simulated_chip(table: Provider | None) -> dict[str, str]:
    """The options that say which chip a simulator stands for; none where the provider is no simulator."""
    return dict(table.simulated_as) if table is not None and is_simulated(table.name) else {}


def simulated(name: str, machine: MachineFacts | None = None) -> str:
    """What users are told of an engine whose times mean nothing on a machine (None: this one)."""
    if machine is None:
        where, emulated = "this machine", processor.emulation()
    else:
        where, emulated = machine.where, machine.emulation and f"{machine.where}: {machine.emulation}"
    return emulated or f"{name} is a simulator on {where}, whose times mean nothing"

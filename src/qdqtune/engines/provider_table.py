"""The execution providers of ONNX Runtime: each file in `engines/providers` with a value `PROVIDER` is one."""

from __future__ import annotations

import pkgutil
import platform
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

import qdqtune.engines.providers as providers
from qdqtune.engines.processor import emulation
from qdqtune.engines.providers.provider import Provider

OTHERS = frozenset({"provider"})
"""Files of the folder that hold no provider."""


def _found() -> dict[str, Provider]:
    names = sorted(module.name for module in pkgutil.iter_modules(providers.__path__) if module.name not in OTHERS)
    tables: list[Provider] = [import_module(f"{providers.__name__}.{name}").PROVIDER for name in names]
    return {table.name: table for table in sorted(tables, key=lambda table: table.name)}


PROVIDERS: Mapping[str, Provider] = MappingProxyType(_found())
"""Execution providers by the name that `engine` has for them."""

OF_EP: Mapping[str, Provider] = MappingProxyType({provider.ep: provider for provider in PROVIDERS.values()})
"""Execution providers by ONNX Runtime's name."""


COST_MODEL = "fake"
"""The engine whose times come from a cost model, on every processor."""


def is_simulated(name: str, machine: str | None = None) -> bool:
    """Whether times of this engine mean nothing on a machine (None: this one): it is a simulator there, or the
    processor is emulated."""
    is_simulator = name in PROVIDERS and (machine or platform.machine()) in PROVIDERS[name].simulated_on
    return is_simulator or (machine is None and name != COST_MODEL and bool(emulation()))


def simulated_chip(table: Provider | None) -> dict[str, str]:
    """The options that say which chip a simulator stands for; none where the provider is no simulator."""
    return dict(table.simulated_as) if table is not None and is_simulated(table.name) else {}


def simulated(name: str) -> str:
    """What users are told of an engine whose times mean nothing here."""
    return emulation() or f"{name} is a simulator on this machine, whose times mean nothing"

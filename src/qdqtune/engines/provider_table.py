"""The execution providers of ONNX Runtime: each file in `engines/providers` with a value `PROVIDER` is one."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

import qdqtune.engines.providers as providers
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

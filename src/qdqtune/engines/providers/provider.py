"""The table of an execution provider: all that qdqtune knows of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qdqtune.types import NumericFormat, QType

DOCUMENTS = "https://onnxruntime.ai/docs/execution-providers"

SYMMETRIC = NumericFormat(QType.INT8, QType.INT8, symmetric=True)
"""Numbers that every provider computes with, if only after it has made floats of them."""


SWITCH, NUMBER = "[01]", "[0-9]+"
"""Patterns of values of plain options."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An execution provider of ONNX Runtime, as an engine.

    name: what `engine` calls it.
    ep: what ONNX Runtime calls it.
    install: the command or the build that brings it.
    known: how the table is known: "tried with ..." or "from its documents", with what was not tried.
    source: the address of its documents.
    like: the engine whose placement rules hold for it.
    numbers: the format of int8 pairs; None: that of the engine `like`.
    notes: what numbers it takes beyond that, in words: 16 bits, opset, zero points.
    weights: weight formats of products.
    plugin: the Python module of its plug-in package, whose `get_library_path` names the library; "" if it is built into
        ONNX Runtime. The engine's option `library` names another library.
    options: its own options by default.
    plain: its own options that name no file, library or address in memory, each with a pattern of its values: only
        these are taken from folders that may come from elsewhere.
    systems: values of `sys.platform` that it exists for; empty: any.
    is_gpu: whether each worker needs a GPU of its own.
    memory: what ONNX Runtime calls the memory of its device; by default that of the CPU.
    precision: the usual precision of what stays in float.
    recording: its option that records the kernels of an inference and starts them together; "" if it has none.
    uses_threads: whether it computes on the CPU's threads; `threads_option` is its own option for their number.
    has_fixed_sizes: whether it takes models only whose sizes are all fixed.
    compiles: whether it runs many nodes as one, so that ONNX Runtime cannot write its graph or time single nodes.
    simulated_on: processors (as `platform.machine` names them) on which it is a simulator: outputs and partitions are
        those of the device, times mean nothing.
    simulated_as: options that say which chip the simulator stands for.
    refuses: the reason why it leaves an operator to the CPU, by operator.
    words: patterns of its log with a group `nodes`, a text with names of nodes in it, and a group `reason`. For each
        node the first pattern that tells of it counts.
    """

    name: str
    ep: str
    install: str
    known: str
    source: str
    like: str
    numbers: NumericFormat | None = None
    notes: str = ""
    weights: tuple[str, ...] = ()
    plugin: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)
    systems: tuple[str, ...] = ()
    is_gpu: bool = False
    memory: str = "cpu"
    precision: Literal["fp32", "fp16"] = "fp32"
    recording: str = ""
    uses_threads: bool = False
    threads_option: str = ""
    has_fixed_sizes: bool = False
    compiles: bool = False
    simulated_on: tuple[str, ...] = ()
    simulated_as: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()

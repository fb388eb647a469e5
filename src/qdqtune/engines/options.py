"""The options that choose an engine, and the number of workers that measure side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdqtune.engines import EngineSpec, normal
from qdqtune.engines.execution import TIME_LIMIT, Execution
from qdqtune.engines.facts import ENGINES, PROVIDERS, facts_of
from qdqtune.engines.machine import MachineFacts, this_machine
from qdqtune.engines.remote import Destination
from qdqtune.engines.tensorrt.options import as_json
from qdqtune.options import (
    COUNT,
    SECONDS,
    TEXT,
    VALUES,
    Duration,
    Option,
    Options,
    check_name,
    names_of,
    number_in,
    text_of,
)

ENGINE_NAMES = (
    f"{', '.join(sorted(ENGINES.keys() - {'fake', *PROVIDERS}))} or fake; or an execution provider of ONNX Runtime: "
    f"{', '.join(PROVIDERS)}"
)


TIME_LIMIT_OPTION = SECONDS(
    "Longest that one build or inference may take, samples of `calibration_data` in each pass over them, and your "
    "metric beside its inferences: 90s, 10m, 1h.",
    "Engine",
    default=TIME_LIMIT,
)


def _engine(value: Any) -> str | EngineSpec:
    if isinstance(value, EngineSpec):
        return value
    return facts_of(check_name(value)).name


def _threads(value: Any) -> tuple[int, ...] | None:
    counts = [number_in(1, 9999, int, (), count) for count in names_of(value)]
    return tuple(dict.fromkeys(counts)) or None


Threads = Option[tuple[int, ...] | None]


THREADS = TEXT(
    "CPU threads of onnxruntime and openvino. One gives the most stable timing. tune, compare and verify take "
    "several, such as 1,4: what tune ships is slower at none of them and faster at one. Others take the largest.",
    "Engine",
    "of a CPU; one is the steadiest",
    default_in_words="tune and compare: a thread for each physical core, as engines take by themselves; else 1",
    convert=_threads,
    metavar="1,4,16",
    is_repeated=True,
)


class EngineOptions(Options):
    engine: str | EngineSpec = TEXT(
        f"Engine to build and time on: {ENGINE_NAMES}.",
        "Engine",
        "what to build and time on",
        default="onnxruntime",
        metavar="NAME",
        convert=_engine,
    )
    threads: Threads = THREADS
    engine_options: Option[Mapping[str, Any]] = VALUES(
        "An option of the engine, by a name of its page in the reference; VALUE is JSON or text. Repeatable.",
        "Engine",
        flags="--engine-option",
    )
    time_limit: Duration = TIME_LIMIT_OPTION

    @property
    def engine_name(self) -> str:
        return self.engine_spec.name

    @property
    def engine_spec(self) -> EngineSpec:
        """The engine with the options that the user named, and no others."""
        return normal(
            self.engine if isinstance(self.engine, EngineSpec) else EngineSpec(self.engine, self.engine_options)
        )

    def spec(
        self, input_shapes: Mapping[str, tuple[int, ...]] | None = None, *, threads: int | None = None
    ) -> EngineSpec:
        """The engine with the options that were given. `open_engine` refuses options that the engine does not have.

        `threads` is the default of that option for an engine on the CPU (None: 1). `input_shapes`, the shapes that the
        model is measured with, are the default of its option `opt_shapes`.
        """
        spec = self.engine_spec
        if isinstance(self.engine, EngineSpec):
            return spec
        chosen = dict(spec.options)
        if spec.facts.is_tensorrt:
            if input_shapes:
                chosen.setdefault("opt_shapes", input_shapes)
            chosen = as_json(chosen)
        if spec.facts.is_threaded:
            chosen.setdefault("threads", max(self.threads or [threads or 1]))
        return EngineSpec(spec.name, chosen)


def with_timing_cache(spec: EngineSpec, folder: Path) -> EngineSpec:
    if not spec.facts.has_timing_cache or "timing_cache" in spec.options:
        return spec
    return EngineSpec(spec.name, {**spec.options, "timing_cache": str(folder.absolute() / "timing.cache")})


def _machine(value: Any) -> str:
    text = text_of(value)
    Destination.parsed(text)
    return text


ON = TEXT(
    "Build, run and time on this machine, over SSH, or over adb with adb:SERIAL in place of USER@HOST; PYTHON, by "
    "default python3, is the one there that has qdqtune.",
    "Engine",
    convert=_machine,
    metavar="USER@HOST[:PYTHON]",
)


def on_device(on: str | None, execution: Execution) -> Execution:
    """`execution` with the machine that the option `on` names, if any, as its device."""
    return execution if on is None else replace(execution, device=Destination.parsed(on).start)


def machine_of(on: str | None) -> MachineFacts:
    """The machine that the option `on` names, by default this one."""
    return this_machine() if on is None else Destination.parsed(on).facts()


class WorkerOptions(Options):
    """How many workers measure at a time, and where."""

    workers: int | None = COUNT(
        "Devices that measure side by side, each a GPU or cores of its own. Several models: one device a model.",
        "Engine",
        default_in_words="1; with `ray` all that there is room for",
    )
    cores_per_worker: int | None = COUNT(
        "Cores of each worker, which no other uses.", "Engine", default_in_words="`threads`"
    )
    on: str | None = ON
    ray: str | None = TEXT(
        "Workers on the Ray cluster at this address (auto: the one that runs here).", "Engine", metavar="ADDRESS"
    )

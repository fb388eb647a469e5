"""Checks, before a command begins, that it may write the files that its options name (see `system.checks`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.engines.options import tensorrt_cache
from qdqtune.engines.tensorrt.options import libraries_in
from qdqtune.options import Options, options_of
from qdqtune.system.checks import Output, check_outputs


def check_options(options: Options) -> None:
    """Check that a command may write the files that its options name, or that it writes by default.

    Raises:
        BadOption, OutputError: it may not.
    """
    outputs, values, of_engine = list[Output](), vars(options), getattr(options, "engine_options", None) or {}
    inputs = {"plugin libraries": [Path(library) for library in libraries_in(of_engine)]}
    for name, own in options_of(type(options)).items():
        kind, raw = own.kind, options.raw.get(name)
        if kind.writes is not None:
            path = values[name] or kind.usual(values)
            if path is not None and (values[name] or path.parent.is_dir()):  # otherwise the input there is missing, too
                outputs += kind.writes(path, f"`{name}`", values)
        if kind.reads is not None:
            for one in raw if isinstance(raw, list | tuple | Mapping) else [raw]:
                if isinstance(one, str | Path | WorkloadFile):
                    inputs.setdefault((kind.what or name).replace("_", " "), []).extend(kind.reads(str(one)))
    if isinstance(cache := of_engine.get("timing_cache"), str | Path):
        outputs += tensorrt_cache(Path(cache), "`engine_options` timing_cache", values)
    if outputs:
        check_outputs(outputs, inputs)

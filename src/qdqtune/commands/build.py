"""`qdqtune build`: saves a model in an engine's own format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqtune.commands.inputs import ModelOption, execution_of
from qdqtune.commands.shown import Shown
from qdqtune.engines.facts import ENGINES, facts_of
from qdqtune.engines.options import EngineOptions, with_timing_cache
from qdqtune.engines.runner import temporary_runner
from qdqtune.engines.tensorrt.options import timing_cache
from qdqtune.errors import EngineFailure
from qdqtune.explanation.formatting import size
from qdqtune.graph.loading import read
from qdqtune.graph.saving import model_outputs
from qdqtune.options import OUTPUT, REQUIRED, File
from qdqtune.system.checks import Output, written_as
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.observer import Observer

ARTIFACT = "build"
"""The kind of files that `build` writes (see `system.checks.written_as`)."""


def _outputs(path: Path, name: str, options: EngineOptions) -> list[Output]:
    """The files that `build` writes: the built model, and beside it a timing cache unless options name one."""
    engine = options.engine_spec
    cached = with_timing_cache(engine, path.parent)
    cache = [] if cached is engine else timing_cache(Path(cached.options["timing_cache"]), "the timing cache")
    if engine.facts.constants:
        files = path, path.with_suffix(engine.facts.constants)
        return [*(Output(file, name, written_as(ARTIFACT)) for file in files), *cache]
    return [*model_outputs(path, name, ARTIFACT), *cache]


class BuildOptions(EngineOptions, ModelOption, kw_only=False):
    output: File = OUTPUT(
        "File to write.", "Output", "file to write", default=REQUIRED, writes=_outputs, flags="-o --output"
    )


@dataclass(frozen=True, repr=False)
class Artifact(Shown):
    """The written files (weights may have their own), their total size, and the duration of the build."""

    engine: str
    files: tuple[Path, ...]
    nbytes: int
    seconds: float

    def in_words(self) -> str:
        files = " and ".join(map(str, self.files))
        return f"{files}: {facts_of(self.engine).saves}, {size(self.nbytes)}, built in {self.seconds:.1f} s"

    def to_dict(self) -> dict[str, Any]:
        files = [str(file) for file in self.files]
        return {"engine": self.engine, "files": files, "bytes": self.nbytes, "seconds": self.seconds}


def build(options: BuildOptions, observer: Observer | None = None) -> Artifact:
    """Build a model, and save it in the engine's own format. `output` appears whole or not at all.

    Raises:
        BadModel: the file cannot be read.
        BadOption: an engine option cannot be used.
        OutputError: `output` cannot be written.
        EngineUnavailable, EngineFailure: the engine cannot be opened, refuses the model, cannot save it, or does not
            load what it has saved.
    """
    model, output = options.model, options.output
    read(model)  # refuses what is no model
    spec = with_timing_cache(options.spec(), output.parent)
    if not spec.facts.saves:
        able = ", ".join(name for name, facts in ENGINES.items() if facts.saves)
        raise EngineFailure(f"engine {spec.name!r} has no format of its own to save; these have: {able}")
    with temporary_runner(spec, execution_of(options)) as runner, atomic_write(output, ARTIFACT) as fresh:
        handle = runner.load(model, "build")
        runner.save(handle, fresh)
        made = sorted(path for path in fresh.parent.iterdir() if path.is_file())
        nbytes = sum(path.stat().st_size for path in made)
    return Artifact(spec.name, tuple(output.with_name(path.name) for path in made), nbytes, handle.build_seconds)

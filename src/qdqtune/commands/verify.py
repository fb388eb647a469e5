"""`qdqtune verify`: whether the result of a run also holds on this machine, or on another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from qdqtune.commands.compare import CompareOptions, Comparison, Gated, GateOptions, MeasureOptions, compare
from qdqtune.commands.inputs import execution_of
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines import EngineSpec, threads_of
from qdqtune.engines.library_settings import plain
from qdqtune.engines.options import ON, THREADS, TIME_LIMIT_OPTION, Threads, machine_of, on_device
from qdqtune.engines.runner import temporary_runner
from qdqtune.errors import BadOption, ConstraintUnmet
from qdqtune.explanation.formatting import samples
from qdqtune.graph.loading import files_of
from qdqtune.options import OF_RUN, REQUIRED, VALUES, Duration, File, Option, options_of
from qdqtune.system.checks import content_digest
from qdqtune.timing.ratios import overlap
from qdqtune.tuning.deploy import changed_files, read_settings
from qdqtune.tuning.observer import Observer

CANNOT_TELL = 3
"""The exit code where a measurement decides nothing."""

Finding = Literal["holds", "does not hold", "cannot tell"]


class VerifyOptions(MeasureOptions, kw_only=False):
    folder: File = OF_RUN("The output folder of a finished run.", default=REQUIRED, metavar="FOLDER")
    threads: Threads = replace(THREADS, default_in_words="those of the proof for which there are cores")
    engine_options: Option[Mapping[str, Any]] = VALUES(
        "An option of the engine as it is here, such as the path of a program or plug-in. Repeatable.",
        "Engine",
        flags="--engine-option",
    )
    time_limit: Duration = TIME_LIMIT_OPTION
    on: str | None = ON


@dataclass(frozen=True, repr=False)
class Verified(Shown):
    """Whether the proven result holds here, and why. `differences` are properties of engine and machine that differ
    from the proof, by name: (there, here). `comparison` is None if nothing was measured."""

    folder: Path
    finding: Finding
    why: str
    differences: Mapping[str, tuple[str, str]]
    comparison: Comparison | None = None
    gated: tuple[Gated, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.finding == "holds"

    @property
    def exit_code(self) -> int:
        return {"holds": 0, "cannot tell": CANNOT_TELL}.get(self.finding, ConstraintUnmet.exit_code)

    def in_words(self) -> str:
        return f"{self.finding}: {self.why}"

    def table(self) -> Table:
        return super().table() if self.comparison is None else self.comparison.table()

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "finding": self.finding,
            "why": self.why,
            "differences": {name: list(both) for name, both in self.differences.items()},
            "gate": [asdict(one) for one in self.gated],
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "notes": list(self.notes),
        }


def verify(options: VerifyOptions, observer: Observer | None = None) -> Verified:
    """Compare files, engine and machine (`on`) with those of the proof, and time float and tuned model again.

    Raises:
        InputError: the folder has no settings of a run, or samples cannot be used.
        EngineUnavailable: the engine is not available.
        EngineFailure: it cannot run the float model.
    """
    folder, settings, execution = options.folder, read_settings(options.folder), execution_of(options)
    for name in (settings.model, *[settings.baseline] * (settings.shipped == "tuned")):
        if not (folder / name).exists():
            raise BadOption(f"{folder / name} is missing: copy it from the folder of the run")
    changed = changed_files(folder, settings)
    if settings.model in changed:
        return Verified(folder, "does not hold", f"{folder / settings.model} is not the file that was proven", {})
    # The number of threads is that of another machine, and no file or program that a folder names is used.
    spec, left = plain(settings.spec)
    kept = {name: value for name, value in spec.options.items() if name != "threads" or not spec.facts.is_threaded}
    spec = EngineSpec(spec.name, kept | dict(options.engine_options))
    there, machine = on_device(options.on, execution), machine_of(options.on)
    with temporary_runner(spec, there) as runner:
        described = runner.describe()
    at = machine.place
    names = [name for name in dict.fromkeys((*settings.engine, *described)) if name != "threads"]
    both = {name: (settings.engine.get(name, "none"), described.get(name, "none")) for name in names}
    differences = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    notes = [f"{name}: proven with {then}, {at} {now}" for name, (then, now) in differences.items()]
    if missing := [name for name in left if name not in options.engine_options]:
        whose = f"not taken from {folder}, where it may name a file or library"
        notes.append(f"{', '.join(missing)}: {whose}; `engine_options` gives it again")
    if settings.proven.unchecked and options.calibration_data is None:
        notes.append(f"nobody has checked the accuracy of {settings.model}: give `calibration_data`")

    def found(finding: Finding, why: str, **measured: Any) -> Verified:
        return Verified(folder, finding, why, differences, notes=tuple(notes), **measured)

    if settings.shipped != "tuned":
        return found("holds", f"{settings.told}; there is no speedup to check")
    if changed:
        other = f"{folder / changed[0]} is not the file of the proof"
        return found("cannot tell", f"{other}: copy it from the folder of the run, to compare with")
    cores = machine.cores
    counts: tuple[int | None, ...] = (None,)
    if options.threads is not None:
        counts = options.threads
    elif threads_of(spec) is not None and settings.proven.threads:
        most = cores if spec.facts.is_threaded else max(settings.proven.threads)
        counts = tuple(count for count in settings.proven.threads if count <= most)
    if not counts:
        took = f"the proof took {min(settings.proven.threads)} threads"
        return found("cannot tell", f"{took}, and {at} are {cores} cores to use: give `threads`")
    files = folder / settings.baseline, folder / settings.model
    if settings.given is not None:  # the baseline has been rewritten, and is faster than the model of the proof
        given, digest = Path(settings.given[0]), settings.given[1]
        whole = given.is_file() and all(file.is_file() for file in files_of(given))
        if not whole or content_digest(files_of(given)) != digest:
            why = f"it was proven against {given}, which is not here as it was, and {files[0]} has its rewrites already"
            return found("cannot tell", f"{why}: compare {files[1]} with your file by qdqtune compare")
        files = given, files[1]
    shapes = {name: shape for name, (_, shape) in settings.inputs.items()}
    asked = {name: getattr(options, name) for name in options_of(MeasureOptions)}
    asked["fix_inputs"] = {**settings.fix_inputs, **options.fix_inputs}
    asked["scores"] = options.scores or settings.scores
    if counts != (None,):
        asked["threads"] = counts
        spec = EngineSpec(spec.name, {**spec.options, "threads": counts[0]})
    as_compare = CompareOptions(engine=spec, time_limit=options.time_limit, on=options.on, **asked)
    done = compare(files, as_compare, observer, shapes)
    proven = settings.proven
    gate = GateOptions(
        fail_below=options.fail_below or (1.0 if proven.timed else None),
        min_sqnr=options.min_sqnr or (proven.min_sqnr_db if done.judged else None),
        min_agreement=options.min_agreement or (proven.min_agreement if done.judged else None),
    )
    gated = tuple(one for row in done.rows for one in row.gated(gate))
    # As the proof would: slower at no number of threads, faster at one, within limits.
    finding: Finding = "cannot tell"
    over = f" on {samples(done.judged, done.is_held_out)}"
    timed = [(row.ratio, row) for row in done.rows if row.ratio is not None]
    if bad := next((one for one in gated if not one.passes), None):
        finding, why = "does not hold", f"{bad.file}, {bad.limit}: {bad.told}"
    elif not proven.timed and done.judged:  # nothing was said about speed: the outputs decide
        near = [f"output SQNR {row.sqnr_db:.1f} dB" for row in done.rows if row.sqnr_db is not None]
        finding, why = "holds", f"nothing was timed in the search; {', '.join(near) or 'outputs are equal'}{over} {at}"
    elif not proven.timed:
        why = "nothing was timed, and outputs were not compared"
    elif not timed:
        why = f"nothing is timed {at}: it is a simulator"
    else:
        own = settings.spec.options.get("threads")  # at which the ratio of the proof was measured
        ratio, best = min(timed, key=lambda pair: (pair[1].threads != own, pair[0].median))
        exact = "" if best.sqnr_db is None else f", output SQNR {best.sqnr_db:.1f} dB{over}"
        before = "" if proven.speed is None else f" (proven: {proven.speed.speedup})"
        why = f"{best.name} is {ratio.speedup} as fast as float {at}{before}{exact}"
        if any(one.outcome == "holds" for row in done.rows for one in gate.of_speed(row.name, row.ratio)):
            finding = "holds"
    notes += done.notes
    claim = proven.speed
    if claim is not None and timed and all(r.median > claim.median and not overlap(r, claim) for r, _ in timed):
        notes.append(f"it is less than was proven, {claim.speedup}: the intervals do not overlap")
    if left_out := [count for count in proven.threads if count not in counts and counts != (None,)]:
        notes.append(f"proven at {', '.join(map(str, left_out))} threads as well, which were not compared here")
    if not done.judged:
        notes.append("outputs were not compared, which takes samples: give `calibration_data`")
    return found(finding, why, comparison=done, gated=gated)

"""At how many threads a placement has to be found, and proven: what a search at one thread, and one at many, ship at
every number of threads that users deploy with.

Each model is tuned at each of `--tune-at`; then the float model and every file that came out meet in interleaved rounds
at each of `--counts`, and as the engine runs them when nobody tells it a number ("default"). Cells are the time of the
tuned file by that of the float model; "float" means that the search shipped no pair. Accuracy sets no limit here.

Whatever uses few cores runs side by side, each job pinned to cores of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import zoo
from cores import pinned, shares

from qdqtune.calibration.inputs import input_specs
from qdqtune.calibration.samples import open_samples
from qdqtune.calibration.scales import Calibration
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import Runner
from qdqtune.errors import QdqtuneError
from qdqtune.graph.loading import load
from qdqtune.timing.pairing import fresh_pairs
from qdqtune.timing.ratios import Plan, Ratio, ratio
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import EFFORTS, Settings
from qdqtune.types import Failure, Measurement, Sample

DEFAULT = 0
"""As a number of threads: whatever the engine takes."""

SETTLED = 0.1
"""Seconds after which the threads of an ONNX Runtime session that nobody asks sleep."""

T = TypeVar("T")


@dataclass(frozen=True)
class Tuned:
    """What a search at one number of threads shipped; `failed` says why it shipped nothing."""

    entry: zoo.Entry
    at: int
    file: Path
    seconds: float = 0.0
    failed: str = ""


@dataclass(frozen=True)
class Met:
    """A tuned file against the float model at one number of threads; None where it does not run."""

    tuned: Tuned
    threads: int
    float_ms: float
    found: Ratio | None


def tuned(entry: zoo.Entry, engine: str, at: int, folder: Path, budget: float | None) -> Tuned:
    """Search at a number of threads; the same folder again measures nothing."""
    out, effort = folder / f"{entry.name}_{engine}_{at}", EFFORTS["quick"]
    settings = Settings(
        entry.path, output_dir=out, engine=EngineSpec(engine, {"threads": at}),
        calibration_data=entry.data, calibration_samples=8,
        accuracy_samples=8, calibration=Calibration("minmax", bias_correction=False), fix_inputs=entry.fixed,
        plan=Plan(effort.looks), proof=effort.proof, builds=effort.builds["cut"], time_budget=budget,
        min_sqnr=None, min_agreement=None, deploy_threads=(at,),
    )  # fmt: skip
    begun = time.monotonic()
    try:
        result = tune(settings)
    except QdqtuneError as error:
        return Tuned(entry, at, out, failed=f"{type(error).__name__}: {error}")
    return Tuned(entry, at, out / "optimized_final.onnx", time.monotonic() - begun, "" if result.improved else "float")


def meet(one: Tuned, engine: str, threads: int, rounds: int) -> Met:
    """Rounds of one pair of builds at a number of threads."""
    sample = feed(one.entry)
    if threads == DEFAULT:
        return Met(one, threads, *by_default(one, engine, sample, rounds))
    with (
        TemporaryDirectory() as folder,
        Runner(EngineSpec(engine, {"threads": threads}), log_dir=Path(folder)) as runner,
    ):
        runner.feed(sample)
        plan = Plan((rounds,), turn_seconds=0.01)
        pairs = fresh_pairs(runner, one.entry.path, one.file, plan, [0], ["meet"])
    if isinstance(pairs, Failure):
        return Met(one, threads, 0.0, None)
    (found,) = pairs
    return Met(one, threads, 1e3 * float(np.median(found.a)), ratio(found, plan))


def feed(entry: zoo.Entry) -> Sample:
    """The first sample, with the inputs that tuning has fixed."""
    asked = {spec.name: spec for spec in input_specs(load(entry.path))}
    shapes = {name: [size or 1 for size in asked[name].shape] for name in entry.fixed}
    fixed = {name: np.full(shapes[name], value, asked[name].dtype) for name, value in entry.fixed.items()}
    model = load(entry.path, fix_inputs=entry.fixed)
    return open_samples(entry.data, model, limit=1, fixed=entry.fixed).first(1)[0] | fixed


def by_default(one: Tuned, engine: str, sample: Sample, rounds: int) -> tuple[float, Ratio]:
    """The same with sessions that nobody has told anything, as most programs open them."""
    run = [plain(engine, file, sample) for file in (one.entry.path, one.file)]
    for each in run * 3:
        each()
    runs = max(1, int(0.01 / max(seconds_of(each, 1) for each in run)))
    sides = []
    for number in range(rounds):
        first, second = run if number % 2 else run[::-1]
        slots = [slot(each, runs) for each in (first, second, second, first)]
        outer, inner = (slots[0] + slots[3]) / 2, (slots[1] + slots[2]) / 2
        sides.append((outer, inner) if number % 2 else (inner, outer))
    a, b = zip(*sides, strict=True)
    return 1e3 * float(np.median(a)), ratio(Measurement(a, b), Plan((rounds,)))


def plain(engine: str, file: Path, sample: Sample) -> Callable[[], Any]:
    """One inference of a file by an engine as it comes."""
    if engine == "openvino":
        import openvino as ov

        request = ov.Core().compile_model(str(file), "CPU").create_infer_request()
        names = {port.get_any_name() for port in request.model_inputs}
        return partial(request.infer, {name: array for name, array in sample.items() if name in names})
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    inputs = {i.name for i in session.get_inputs()}
    return partial(session.run, None, {name: array for name, array in sample.items() if name in inputs})


def slot(run: Callable[[], Any], runs: int) -> float:
    """Seconds of one inference, once the idle threads of other sessions spin no more and its own are awake."""
    time.sleep(SETTLED)
    run()
    return seconds_of(run, runs)


def seconds_of(run: Callable[[], Any], runs: int) -> float:
    """Seconds of one inference, of so many in a row."""
    begun = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - begun) / runs


def side_by_side(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """What the jobs give, as it comes; each has as many cores as threads, all of them for the default."""
    cores = len(os.sched_getaffinity(0))
    count = 1 if threads == DEFAULT else max(1, cores // max(threads, 2))
    with pinned(shares(count)) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            yield done.result()


def main() -> None:
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--keep", type=Path, required=True, help="folder of the runs")
    arguments.add_argument("--engine", default="onnxruntime", choices=["onnxruntime", "openvino"])
    arguments.add_argument("--tune-at", type=int, nargs="+", default=[1, 8], help="threads of the searches")
    arguments.add_argument(
        "--counts",
        type=int,
        nargs="*",
        default=[1, 4, 8, 16, DEFAULT],
        help="threads of the rounds; 0 for what the engine takes",
    )
    arguments.add_argument("--time-budget", type=float, help="seconds of each search")
    arguments.add_argument("--rounds", type=int, default=16, help="rounds of each pair (%(default)s)")
    given = arguments.parse_args()
    zoo.print_machine()
    begun, cores = time.monotonic(), len(os.sched_getaffinity(0))
    entries = zoo.find(given.models, given.names)
    files: list[Tuned] = []
    for at in given.tune_at:
        tunes = [partial(tuned, e, given.engine, at, given.keep.absolute(), given.time_budget) for e in entries]
        for one in side_by_side(tunes, at):
            print(
                f"{time.monotonic() - begun:5.0f} s  {one.entry.name} at {at}: {one.failed or f'{one.seconds:.0f} s'}",
                flush=True,
            )
            files.append(one)
    runnable = [one for one in files if one.file.is_file() and one.failed != "float"]
    met: list[Met] = []
    counts = [c for c in given.counts if c <= cores]
    for threads in counts:
        jobs = [partial(meet, one, given.engine, threads, given.rounds) for one in runnable]
        for found in side_by_side(jobs, threads):
            what = f"{found.tuned.entry.name} of {found.tuned.at} at {threads or 'default'}"
            print(f"{time.monotonic() - begun:5.0f} s  {what}: {found.float_ms:.3f} ms, {found.found}", flush=True)
            met.append(found)
    print_result(files, met, counts)


def print_result(files: Sequence[Tuned], met: Sequence[Met], counts: Sequence[int]) -> None:
    """A row for each model and search: float times, then ratios, by number of threads."""
    names = [str(c or "default") for c in counts]
    known = {(m.tuned.entry.name, m.tuned.at, m.threads): m for m in met}
    rows = []
    for one in sorted(files, key=lambda t: (t.entry.name, t.at)):
        cells = [known.get((one.entry.name, one.at, c)) for c in counts]
        times = ["" if m is None else f"{m.float_ms:.2f}" for m in cells]
        ratios = [one.failed[:30] if m is None else str(m.found or "failed") for m in cells]
        rows.append([one.entry.name, str(one.at), *times, *ratios])
    print()
    zoo.print_table(["model", "tuned at", *(f"float ms, {n}" for n in names), *(f"ratio, {n}" for n in names)], rows)


if __name__ == "__main__":
    main()

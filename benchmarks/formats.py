"""Weights in fewer bits and pairs, on models that read more weights than they multiply: what `tune` ships against ONNX
Runtime's own quantizers (MatMulNBits of 4 and 8 bits, quantize_static), each against float in interleaved rounds. On
OpenVINO the weights in fewer bits are those of NNCF's weight compression (needs nncf).

Cells are the median ratio of time to the float model with its interval, and the output SQNR in dB, on samples that no
quantizer has seen. Jobs run side by side where there are cores, each pinned to cores of its own. `tune` has to keep the
SQNR that the int4 quantizer keeps.

Models named after `--same` are tuned twice instead, with pairs alone and with all formats: the two files meet.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import zoo
from quantizers import write_static

from qdqtune.calibration.samples import open_samples
from qdqtune.calibration.scales import Calibration
from qdqtune.commands.compare import Row, compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.numerics.accuracy import FLOOR_DB
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.weight_only import BLOCK_OPSET
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.folder import FINAL, PLACEMENT
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from qdqtune.types import Sample

BITS = (4, 8)
"""Of the weights of MatMulNBits."""

SAMPLES, UNSEEN = 8, 4
"""Samples to calibrate on, and to judge by."""


@dataclass(frozen=True)
class Job:
    """One model at one number of threads. `twice`: tuned with pairs alone and with all formats."""

    entry: zoo.Entry
    threads: int
    engine: str
    folder: Path
    seconds: float
    twice: bool = False

    def settings(self, floor: float | None, formats: tuple[str, ...] | None = None) -> Settings:
        """What `tune` is told; its folder is named by the formats."""
        name = f"{self.entry.name}_{self.threads}_{'_'.join(formats or ('all',))}"
        return Settings(
            self.entry.path, output_dir=self.folder / name,
            engine=EngineSpec(self.engine, {"threads": self.threads}), formats=formats,
            calibration_data=self.entry.data, accuracy_samples=SAMPLES, min_sqnr=floor, time_budget=self.seconds,
            calibration=Calibration("minmax", bias_correction=False), fix_inputs=self.entry.fixed,
            threads=(self.threads,),
        )  # fmt: skip


def samples_of(entry: zoo.Entry, count: int, seed: int) -> list[Sample]:
    """Samples as `tune` draws them where there are no data."""
    return open_samples(entry.data, load(entry.path), seed=seed).first(count)


def nbits(source: Path, target: Path, bits: int) -> None:
    """What ONNX Runtime's own quantizer makes of a model: blocks of 32, symmetric, computing on 8-bit activations."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    logging.disable(logging.INFO)
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, accuracy_level=4, bits=bits)
    quantizer = MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), False)


def compressed(source: Path, target: Path, bits: int) -> None:
    """What NNCF's weight compression makes of a model: 4 bits in symmetric blocks of 128 but for the last product that
    has 8; or 8 bits a channel."""
    import nncf
    import onnx
    from onnx.version_converter import convert_version

    modes = {4: nncf.CompressWeightsMode.INT4_SYM, 8: nncf.CompressWeightsMode.INT8_ASYM}
    model = convert_version(onnx.load(source), BLOCK_OPSET)  # which has what it writes for all engines
    onnx.save(nncf.compress_weights(model, mode=modes[bits]), target)


def peers(entry: zoo.Entry, folder: Path, engine: str) -> dict[str, Path]:
    """The files of the other quantizers, written once."""
    files = {name: folder / f"{entry.name}_{engine}_{name}.onnx" for name in ("int4", "int8", "static")}
    for bits in BITS:
        if not files[f"int{bits}"].exists():
            (compressed if engine == "openvino" else nbits)(entry.path, files[f"int{bits}"], bits)
    if not files["static"].exists():
        numbers = numeric_format(engine, "int8")
        write_static(load(entry.path), samples_of(entry, SAMPLES, 0), numbers, files["static"])
    return files


def run(job: Job, results: Queue[tuple[Job, dict[str, Row], str]]) -> None:
    """Tune, and meet the others."""
    spec, plan = EngineSpec(job.engine, {"threads": job.threads}), Plan((12, 24))
    judged, path = samples_of(job.entry, UNSEEN, 7), job.entry.path
    with Runner(spec, log_dir=job.folder) as runner:
        if job.twice:
            every, pairs = job.settings(None), job.settings(None, ("int8",))
            told = [tuned(every), tuned(pairs)]
            files = [path, every.output_dir / FINAL, pairs.output_dir / FINAL]
            known = dict(zip(("all", "pairs"), compare_files(files, runner, judged, plan), strict=True))
            known["all / pairs"] = compare_files(files[:0:-1], runner, judged, plan)[0]
            results.put((job, known, "; ".join(told)))
            return
        made = peers(job.entry, job.folder, job.engine)
        known = dict(zip(made, compare_files([path, *made.values()], runner, judged, plan), strict=True))
        reached = known["int4"].sqnr_db
        floor = FLOOR_DB if reached is None else np.ceil(10 * reached) / 10
        settings = job.settings(float(floor))
        shipped = tuned(settings)
        known["tune"] = compare_files([path, settings.output_dir / FINAL], runner, judged, plan)[0]
    results.put((job, known, shipped))


def tuned(settings: Settings) -> str:
    """What `tune` ships, after how many candidates and seconds."""
    begun = time.monotonic()
    result = tune(settings)
    placement = read_placement_file(settings.output_dir / PLACEMENT).placement
    kinds = "/".join(sorted({s.name for s in placement.weight_formats.values()})) or "in fewer bits"
    tensors = len({e.tensor for e in placement})
    stored = f"{len(placement.weight_only)} weights {kinds}"
    return f"{tensors} tensors in pairs, {stored}; {len(result.history)} candidates, {time.monotonic() - begun:.0f} s"


def cell(row: Row) -> str:
    """Ratio to float and SQNR."""
    if row.ratio is None:
        return f"fails: {row.reason[:40]}"
    accuracy = "exact" if row.sqnr_db is None else f"{row.sqnr_db:.1f} dB"
    return f"{row.ratio.median:.2f} [{row.ratio.low:.2f}, {row.ratio.high:.2f}] {accuracy}"


def scheduled(jobs: Sequence[Job]) -> list[tuple[Job, dict[str, Row], str]]:
    """Every job as soon as there are cores for its threads and its own work."""
    free, waiting = sorted(os.sched_getaffinity(0)), list(jobs)
    running: dict[multiprocessing.Process, list[int]] = {}
    results: Queue[tuple[Job, dict[str, Row], str]] = multiprocessing.Queue()
    finished = []
    while waiting or running:
        for job in list(waiting):
            wanted = min(job.threads + 1, os.cpu_count() or 1)
            if len(free) >= wanted:
                cores, free = free[:wanted], free[wanted:]
                process = multiprocessing.Process(target=pinned, args=(job, results, cores))
                process.start()
                running[process] = cores
                waiting.remove(job)
        while not results.empty():
            finished.append(results.get())
            print_job(*finished[-1])
        for process in [p for p in running if not p.is_alive()]:
            free = sorted(free + running.pop(process))
        time.sleep(0.2)
    while not results.empty():
        finished.append(results.get())
        print_job(*finished[-1])
    return finished


def pinned(job: Job, results: Queue[tuple[Job, dict[str, Row], str]], cores: Sequence[int]) -> None:
    """Run a job on its cores."""
    os.sched_setaffinity(0, cores)
    run(job, results)


def print_job(job: Job, rows: dict[str, Row], told: str) -> None:
    """A line as soon as it is known."""
    float_ms = next((r.first_ms for r in rows.values() if r.first_ms is not None), float("nan"))
    cells = "; ".join(f"{name} {cell(row)}" for name, row in rows.items())
    print(f"{job.entry.name} at {job.threads}: float {float_ms:.3f} ms; {cells}; {told}", flush=True)


def main() -> None:
    """Print the tables."""
    asked = zoo.parser(__doc__, [])
    asked.add_argument("--keep", type=Path, required=True, help="folder of runs and files")
    asked.add_argument("--engine", default="onnxruntime")
    asked.add_argument("--threads", type=int, nargs="*", default=[1])
    asked.add_argument("--same", nargs="*", default=[], help="models that are tuned with and without the formats")
    asked.add_argument("--seconds", type=float, default=600.0, help="time budget of one run of tune")
    given = asked.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    zoo.print_machine()
    entries = zoo.find(given.models, given.names) if given.names or not given.same else []
    making = [multiprocessing.Process(target=peers, args=(entry, given.keep, given.engine)) for entry in entries]
    for process in making:
        process.start()
    for process in making:
        process.join()
    made = (given.engine, given.keep, given.seconds)
    jobs = [Job(e, t, *made) for e in entries for t in sorted(given.threads, reverse=True)]
    jobs += [Job(e, min(given.threads), *made, twice=True) for e in zoo.find(given.models, given.same) if given.same]
    found = sorted(scheduled(jobs), key=lambda f: (f[0].entry.name, f[0].threads))
    for twice, names in ((False, ("int4", "int8", "static", "tune")), (True, ("pairs", "all", "all / pairs"))):
        rows = []
        for job, known, told in (each for each in found if each[0].twice == twice):
            float_ms = known[names[1]].first_ms or float("nan")
            cells = [cell(known[name]) for name in names]
            rows.append((job.entry.name, str(job.threads), f"{float_ms:.3f}", *cells, told))
        if rows:
            print()
            zoo.print_table(("model", "threads", "float, ms", *names, "what ships"), rows)
    if len(found) < len(jobs):
        sys.exit(f"{len(jobs) - len(found)} jobs failed")


if __name__ == "__main__":
    main()

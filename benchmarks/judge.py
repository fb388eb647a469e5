"""Times the files of one network in the same rounds, and compares their outputs. It shares no code with the package.

    python benchmarks/judge.py INPUTS float=model.onnx tune=tuned.onnx --threads 4

INPUTS is a folder with a .npz for each sample. The first file is the reference. Each file runs in a process of its own,
and one process at a time has its turn: some inferences that do not count, then about 40 ms of them that do. The order
in a round is random, and the second half of the rounds is on fresh builds.

Prints one line of JSON: `times`, seconds an inference by file and round; `sqnr_db`, by file the lowest signal-to-noise
ratio of an output against the reference in ONNX Runtime; `failed`, why a file is in neither.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Sample = dict[str, npt.NDArray[Any]]
Infer = Callable[[Sample], Any]

BUILDS = 2
"""How often each file is built afresh: which addresses a build gets changes its speed."""

TURN, WARM, PAUSE = 0.04, 0.01, 0.06
"""Seconds of a turn that count, of the inferences before them that do not, and of the rest between two turns: threads
of ONNX Runtime spin for some 30 ms after an inference, and would slow down the file whose turn is next."""

SEEN = 4
"""Samples that the timed inferences take in turn."""

EXACT = 200.0
"""The SQNR in dB of outputs without an error, and with the other sign that of outputs that are not numbers."""


def read_samples(folder: Path) -> list[Sample]:
    return [dict(np.load(file)) for file in sorted(folder.glob("*.npz"))]


def open_onnxruntime(file: Path, threads: int, outputs: Sequence[str] | None = None) -> Infer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda sample: session.run(outputs, {name: sample[name] for name in names})


def open_openvino(file: Path, threads: int) -> Infer:
    """In float32, where the other engine computes floats so, too."""
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}  # fmt: skip
    request = openvino.Core().compile_model(str(file), "CPU", settings).create_infer_request()
    ports = [(port, port.get_any_name()) for port in request.model_inputs]

    def infer(sample: Sample) -> None:
        request.infer({port: sample[name] for port, name in ports}, share_inputs=True, share_outputs=True)

    return infer


OPENERS: Mapping[str, Callable[[Path, int], Infer]] = {"onnxruntime": open_onnxruntime, "openvino": open_openvino}


def work(pipe: Connection, engine: str, threads: int, file: Path, inputs: Path) -> None:
    """A process with one file: say how long an inference takes, or why there is none; then time turns on request."""
    try:
        infer, samples = OPENERS[engine](file, threads), read_samples(inputs)[:SEEN]
        single = min(mean_seconds(infer, samples, 1) for _ in range(4))
    except Exception as error:  # noqa: BLE001  what an engine refuses is part of the answer
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(single)
    while pipe.recv():
        mean_seconds(infer, samples, math.ceil(WARM / single))
        pipe.send(mean_seconds(infer, samples, max(1, round(TURN / single))))


def mean_seconds(infer: Infer, samples: Sequence[Sample], count: int) -> float:
    begun = time.perf_counter()
    for i in range(count):
        infer(samples[i % len(samples)])
    return (time.perf_counter() - begun) / count


@contextmanager
def workers(
    files: Mapping[str, Path], engine: str, threads: int, inputs: Path
) -> Iterator[tuple[dict[str, Connection], dict[str, Any]]]:
    """A process for each file, begun one after the other; and what each said first."""
    context = multiprocessing.get_context("spawn")
    processes, pipes, said = [], {}, {}
    for name, file in files.items():
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, engine, threads, file, inputs), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        processes.append(process)
        try:
            said[name] = pipes[name].recv()
        except EOFError:
            said[name] = "its process crashed"
    try:
        yield pipes, said
    finally:
        for process in processes:
            process.kill()
            process.join()


def timed(files: Mapping[str, Path], given: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of an inference by file and round, and why other files have none."""
    rng = random.Random(given.seed)
    times: dict[str, list[float]] = {name: [] for name in files}
    failed: dict[str, str] = {}
    for _ in range(BUILDS):
        whole = {name: file for name, file in files.items() if name not in failed}
        with workers(whole, given.engine, given.threads, given.inputs) as (pipes, said):
            failed |= {name: answer for name, answer in said.items() if isinstance(answer, str)}
            names = [name for name in whole if name not in failed]
            cost = sum(max(TURN, said[name]) + max(WARM, said[name]) + PAUSE for name in names)
            rounds = min(given.rounds, max(BUILDS * 3, int(given.seconds / cost))) if names else 0
            for _ in range(math.ceil(rounds / BUILDS)):
                for name in rng.sample(names, len(names)):
                    time.sleep(PAUSE)
                    pipes[name].send(True)
                    times[name].append(pipes[name].recv())
    return {name: seconds for name, seconds in times.items() if name not in failed}, failed


def sqnr_db(files: Mapping[str, Path], threads: int, inputs: Path) -> dict[str, float | None]:
    """The lowest SQNR of a float output over all samples, by file; None without such outputs."""
    import onnx

    first, *others = files
    graph = onnx.load(files[first], load_external_data=False).graph
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
    names = [each.name for each in graph.output if each.type.tensor_type.elem_type in floats]
    if not names:
        return dict.fromkeys(others)
    samples = read_samples(inputs)
    right = _outputs(files[first], threads, names, samples)
    decibels: dict[str, float | None] = {}
    for other in others:
        ours = _outputs(files[other], threads, names, samples)
        decibels[other] = min(_decibels(*pair) for pair in zip(right, ours, strict=True))
    return decibels


def _outputs(file: Path, threads: int, names: Sequence[str], samples: Sequence[Sample]) -> list[npt.NDArray[Any]]:
    """Each output of all samples, in one row."""
    infer = open_onnxruntime(file, threads, names)
    by_sample = [[np.ravel(array).astype(np.float64) for array in infer(sample)] for sample in samples]
    return [np.concatenate(arrays) for arrays in zip(*by_sample, strict=True)]


def _decibels(right: npt.NDArray[Any], ours: npt.NDArray[Any]) -> float:
    if right.shape != ours.shape or not np.array_equal(np.isfinite(right), np.isfinite(ours)):
        return -EXACT
    there = np.isfinite(right)  # masks hold infinite values
    signal, noise = np.sum(right[there] ** 2), np.sum((right[there] - ours[there]) ** 2)
    if not noise:
        return EXACT
    return float(np.clip(10 * np.log10(signal / noise), -EXACT, EXACT)) if signal else -EXACT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path, help="folder with a .npz for each sample")
    parser.add_argument("files", nargs="+", metavar="NAME=FILE", help="files of the same network, the reference first")
    parser.add_argument("--engine", default="onnxruntime", choices=sorted(OPENERS))
    parser.add_argument("--threads", type=int, default=1, help="threads of each file (%(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="at most so many rounds (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="fewer where they would take longer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (%(default)s)")
    given = parser.parse_args()
    files = {name: Path(file) for name, _, file in (each.partition("=") for each in given.files)}
    times, failed = timed(files, given)
    noise = sqnr_db({name: files[name] for name in times}, given.threads, given.inputs) if times else {}
    print(json.dumps({"times": times, "sqnr_db": noise, "failed": failed}))


if __name__ == "__main__":
    main()

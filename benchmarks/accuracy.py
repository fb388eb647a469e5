"""How close quantized outputs stay to the float model's: the usual quantizers beside `quantize`, method by method.

All calibrate on the same samples of calib.npz, without every fifth where there are 40 or more. A cell is the output
SQNR in dB on all samples of calib.npz / on those of unseen.npz beside it (or else on every fifth), of the worst float
output on ONNX Runtime, and the seconds of quantizing. Rules place the pairs of `quantize`, so that its columns differ
in numbers only.

'latency' is the ratio of `quantize` with its defaults to minmax without corrected biases, in interleaved rounds of two
builds each: numbers move no pair (`--no-latency` leaves it out). Quantizers that are not installed are left out, with a
note. `--by-definition` runs Q and DQ as ONNX defines them and not in kernels of 8 bits, which saturate on processors
without dot products. `--peer NAME=COMMAND` adds a column: `COMMAND float.onnx calib.npz target.onnx` is run, in an
environment of its own, since quantizers want different versions of the same packages.

`--pictures NAME=FOLDER` adds top 1 of a classifier: labels.json names pictures and their classes, of which every fourth
calibrates (in the middle 224 x 224, BGR, less the mean of ImageNet; needs pillow); the others are judged in ten views
each, the middle and the corners, as they are and mirrored, since one picture of a hundred is a whole point. `--arrays
NAME=FILE` takes `images` (uint8, channels first) and `labels` of an .npz, the images normalized as CIFAR-10 usually is.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, run
from typing import Any, get_args

import numpy as np
import zoo
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph
from quantizers import outputs, write_nncf, write_static

from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.samples import HELD_OUT
from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration, Method
from qdqtune.commands.compare import compare_files
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.numerics.accuracy import sqnr_db
from qdqtune.timing.ratios import Plan
from qdqtune.types import Array, NumericFormat, Sample

IMAGENET_MEAN = np.array([123.68, 116.779, 103.939], np.float32)
CIFAR_MEAN, CIFAR_SPREAD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
FAILURES = (Fail, InvalidGraph)
CALIBRATING = 4
"""Every so many labelled pictures one calibrates, and does not count."""

Quantizer = Callable[[Model, Iterable[Sample], NumericFormat, Path], None]
PEERS: Mapping[str, Quantizer] = {
    "static": write_static,
    "static percentile": partial(write_static, method="Percentile"),
    "static entropy": partial(write_static, method="Entropy"),
    "nncf": write_nncf,
    "nncf slow": partial(write_nncf, fast_bias_correction=False),
}
OURS: Mapping[str, Calibration] = {
    **{method: Calibration(method) for method in get_args(Method)},
    **{f"{method}, biases": Calibration(method, bias_correction=True) for method in get_args(Method)},
    "defaults": DEFAULT_CALIBRATION,
}


def row(entry: zoo.Entry, runner: Runner, folder: Path, given: argparse.Namespace) -> list[str]:
    """SQNR and seconds of one model by every quantizer, then top 1 if there are labels."""
    model, plain = load(entry.path, fix_inputs=entry.fixed), folder / "float.onnx"
    save(model, plain)
    apart = None if entry.data is None else Path(entry.data).with_name("unseen.npz")
    prepared = prepare(model, Data(entry.data), fixed=entry.fixed)
    samples = list(prepared.samples)
    unseen = samples[HELD_OUT - 1 :: HELD_OUT] or samples
    if apart is not None and apart.exists():
        unseen = list(prepare(model, Data(str(apart)), fixed=entry.fixed).samples)
    exact, exact_unseen = outputs(plain, runner, samples), outputs(plain, runner, unseen)
    cells = [entry.name]
    for name in given.columns:
        target, start = folder / "quantized.onnx", time.monotonic()
        try:
            if name in given.peers:
                data = folder / "calib.npz"
                np.savez(data, allow_pickle=False, **stacked(list(prepared.calibration)))
                run([*shlex.split(given.peers[name]), plain, data, target], check=True, stdout=DEVNULL, stderr=DEVNULL)
            elif name in PEERS:
                PEERS[name](model, prepared.calibration, runner.numeric_format("int8"), target)
            else:
                how = said(OURS[name]) | {"calibration_data": entry.data, "fix_inputs": entry.fixed}
                quantize(QuantizeOptions(entry.path, output=target, **how))
        except (*FAILURES, CalledProcessError, ImportError, RuntimeError, ValueError) as error:  # a result, too
            cells.append(type(error).__name__)
            continue
        seconds = time.monotonic() - start
        found = [
            sqnr_db(exact, outputs(target, runner, samples)),
            sqnr_db(exact_unseen, outputs(target, runner, unseen)),
        ]
        cells.append(" / ".join("exact" if db is None else f"{db:.1f}" for db in found) + f" ({seconds:.0f} s)")
    ratio = "" if given.no_latency else latency(entry, runner, folder, samples[:1])
    return [*cells, ratio, top_one(entry, runner, folder, given)]


def stacked(samples: Sequence[Sample]) -> dict[str, Array]:
    """All samples of each input along a new first axis."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def said(how: Calibration) -> dict[str, Any]:
    """A way to calibrate, as options of `quantize`."""
    method = f"percentile:{how.percentile}" if how.method == "percentile" else how.method
    return {"calibration_method": method, "bias_correction": how.bias_correction}


def latency(entry: zoo.Entry, runner: Runner, folder: Path, sample: Sequence[Sample]) -> str:
    """Of `quantize` with its defaults, over that with minmax alone."""
    files = [folder / "minmax.onnx", folder / "defaults.onnx"]
    for file, how in zip(files, (Calibration(), DEFAULT_CALIBRATION), strict=True):
        given = said(how) | {"calibration_data": entry.data, "fix_inputs": entry.fixed}
        quantize(QuantizeOptions(entry.path, output=file, **given))
    (found,) = compare_files(files, runner, sample, Plan((24,), 0.01))
    return found.reason if found.ratio is None else str(found.ratio)


def top_one(entry: zoo.Entry, runner: Runner, folder: Path, given: argparse.Namespace) -> str:
    """Shares that the float model and `quantize` with its defaults get right; empty without labels."""
    inputs, classes = labelled(entry.name, given)
    if not inputs:
        return ""
    (name,) = load(entry.path).inputs
    data, ours = folder / "labelled.npz", folder / "ours.onnx"
    shown: dict[str, Array] = {name: np.concatenate([views[0] for views in inputs[::CALIBRATING]])}
    np.savez(data, allow_pickle=False, **shown)
    quantize(QuantizeOptions(entry.path, output=ours, calibration_data=str(data)))
    judged = [(view, classes[i]) for i, views in enumerate(inputs) if i % CALIBRATING for view in views]
    shares = []
    for file in (entry.path, ours):
        answers = outputs(file, runner, [{name: view} for view, _ in judged])
        found = [int(np.argmax(next(iter(answer.values())))) for answer in answers]
        shares.append(np.mean([a == known for a, (_, known) in zip(found, judged, strict=True)]))
    return f"{shares[0]:.1%}, {shares[1]:.1%} of {len(judged)}"


def labelled(name: str, given: argparse.Namespace) -> tuple[list[list[Array]], list[int]]:
    """Views of each input, the usual one first, and classes of a classifier, as they were given on the command line."""
    for place in (path for known, path in given.pictures if known == name):
        classes: dict[str, int] = json.loads((place / "labels.json").read_text())
        return [pictures(place / file) for file in classes], list(classes.values())
    for place in (path for known, path in given.arrays if known == name):
        with np.load(place) as arrays:
            pixels, labels = arrays["images"], arrays["labels"]
        mean, spread = (a.reshape(1, 3, 1, 1) for a in (CIFAR_MEAN, CIFAR_SPREAD))
        images = ((pixels / 255 - mean) / spread).astype(np.float32)
        return [[image] for image in np.split(images, len(images))], [int(label) for label in labels]
    return [], []


def pictures(path: Path) -> list[Array]:
    """Views of a picture as batches of one, BGR, channels first, less the mean: 224 x 224 in the middle and in the
    corners, each as it is and mirrored."""
    from PIL import Image

    image, found = Image.open(path).convert("RGB"), list[Array]()
    for across, down in ((0.5, 0.5), (0, 0), (1, 0), (0, 1), (1, 1)):
        left, top = int(across * (image.width - 224)), int(down * (image.height - 224))
        values = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) - IMAGENET_MEAN
        found += [np.ascontiguousarray(v[None, :, :, ::-1].transpose(0, 3, 1, 2)) for v in (values, values[:, ::-1])]
    return found


def named_command(text: str) -> tuple[str, str]:
    name, _, command = text.partition("=")
    return name, command


def named_path(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


def main() -> None:
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--columns", nargs="+", metavar="COLUMN", help="quantizers and methods (default: all)")
    arguments.add_argument("--peer", type=named_command, action="append", default=[], metavar="NAME=COMMAND")
    arguments.add_argument("--by-definition", action="store_true")
    arguments.add_argument("--no-latency", action="store_true")
    arguments.add_argument("--pictures", type=named_path, action="append", default=[], metavar="NAME=FOLDER")
    arguments.add_argument("--arrays", type=named_path, action="append", default=[], metavar="NAME=FILE")
    given = arguments.parse_args()
    given.peers, every = dict(given.peer), [*PEERS, *dict(given.peer), *OURS]
    given.columns = given.columns or every
    if unknown := [name for name in given.columns if name not in every]:
        arguments.error(f"no columns: {', '.join(unknown)}; there are {', '.join(every)}")
    logging.disable(logging.WARNING)  # advice of quantize_static and NNCF
    if find_spec("nncf") is None:
        print("nncf is not installed (pip install qdqtune[benchmarks]): its columns are left out")
        given.columns = [name for name in given.columns if not name.startswith("nncf")]
    columns = ("model", *given.columns, "latency", "top 1: float, defaults")
    zoo.print_rows(given, columns, partial(row, given=given), {"fuse": False} if given.by_definition else {})


if __name__ == "__main__":
    main()

"""What the tests of the search share: models on which pairs pay in parts, settings, and a worker without a process."""

import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from models import build, feeds, normal
from qdqtune.calibration.scales import Calibration
from qdqtune.engines import EngineSpec
from qdqtune.engines.fake import latency
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.search.region import Config
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.options import Mode
from qdqtune.tuning.result import Result
from qdqtune.tuning.settings import Settings

MIXED = """net (float[B,ROWS,64] x) => (float[B,ROWS,8] y) {
    [first] a = MatMul(x, w0)
    [relu] b = Relu(a)
    [second] c = MatMul(b, w1)
    [skip] d = Add(c, b)
    [softmax] e = Softmax(d)
    [third] f = MatMul(e, w2)
    [tanh] g = Tanh(f)
    [head] y = MatMul(g, w3)
}"""
HOPELESS = """net (float[2,8] x) => (float[2,8] y) {
    [first] a = MatMul(x, w0)
    [tanh] b = Tanh(a)
    [second] y = MatMul(b, w1)
}"""


def mixed(batch: int | None = 8, seed: int = 0) -> Model:
    """Two large products in a row, a residual, and two products that are too small to gain from 8 bits."""
    weights = {"w0": normal(64, 128, seed=seed, scale=0.1), "w1": normal(128, 128, scale=0.1),
               "w2": normal(128, 4), "w3": normal(4, 8)}  # fmt: skip
    return build(MIXED.replace("B,ROWS", "N,64" if batch is None else f"{batch},8"), weights)


def hopeless() -> Model:
    """Products so small that every pair costs more than it saves."""
    return build(HOPELESS, {"w0": normal(8, 8), "w1": normal(8, 8, seed=1)})


def swishing(width: int = 128) -> Model:
    """Two products with a HardSwish of four nodes between them, which a rewrite makes one."""
    text = f"""net (float[8,8,{width}] x) => (float[8,8,8] y) {{
        [first] a = MatMul(x, w0) [plus] p = Add(a, three) [clip] q = Clip(p, zero, six) [times] r = Mul(a, q)
        [sixth] b = Div(r, six) [second] c = MatMul(b, w1) [relu] d = Relu(c) [head] y = MatMul(d, w2)
    }}"""
    numbers = {name: np.float32(value) for name, value in (("zero", 0), ("three", 3), ("six", 6))}
    weights = {"w0": normal(width, width, scale=0.1), "w1": normal(width, width, scale=0.1), "w2": normal(width, 8)}
    return build(text, weights | numbers)


def write(model: Model, folder: Path, name: str = "model", count: int = 3) -> Path:
    """The model as a file, with samples beside it."""
    path = folder / f"{name}.onnx"
    save(model, path)
    samples = feeds(model, count)
    np.savez(path.with_suffix(".npz"), **{k: np.stack([s[k] for s in samples]) for k in model.inputs})
    return path


def settings(model: Path, /, **changes: Any) -> Settings:
    """A short run on the noise-free fake engine, into `out` beside the model."""
    base = Settings(
        model,
        output_dir=model.parent / "out",
        engine=EngineSpec("fake"),
        mode="region",
        cut_seed=False,
        calibration_data=str(model.with_suffix(".npz")),
        accuracy_samples=1,
        calibration=Calibration(),
        plan=Plan(turn_seconds=0.0),
        config=Config(schemes_per_region=8),
        builds=32,
        precision_seconds=0.0,
    )
    return replace(base, **changes)


def mixed_run(folder: Path, mode: Mode, observer: Observer | None = None, **changes: Any) -> Result:
    """A run on the mixed model, written to `folder`."""
    builds = {"cut": 12, "subgraph": 8, "region": 32}[mode]
    return tune(settings(write(mixed(), folder), **{"mode": mode, "builds": builds} | changes), observer)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def timeless(state: bytes) -> bytes:
    """A state file without the times of the float model, which differ from run to run."""
    return re.sub(rb'^{"key": "float:.*$', b'{"key": "float:"}', state, flags=re.MULTILINE)


def without_seconds(summary: Mapping[str, Any]) -> dict[str, Any]:
    """summary.json without what differs from run to run."""
    return {key: value for key, value in summary.items() if not key.endswith("seconds")}


def rows(state: Path) -> list[dict[str, Any]]:
    """The lines of a state file, its head first, without their checksums; with the parts of their keys as `kind` and
    `of`."""
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    for line in lines:
        del line["crc"]
        line["kind"], _, line["of"] = line["key"].partition(":")
    return lines


def cost(path: Path) -> float:
    """Exact latency on the fake engine, in seconds."""
    return latency(onnx.load(path))


def environment() -> dict[str, str]:
    """For a Python of its own that finds what this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


@contextmanager
def room_for(size: int, what: int = resource.RLIMIT_FSIZE) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes; with RLIMIT_AS, it gets so many bytes more of memory."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (size + held if what == resource.RLIMIT_AS else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def out(model: Path, name: str) -> Path:
    return model.parent / "out" / name

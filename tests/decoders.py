"""A decoder of a language model, its calls of two shapes, and short runs over both."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from models import Arrays, build, normal
from qdqtune.calibration.scales import Calibration
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.engines import EngineSpec
from qdqtune.engines.fake import latency
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.settings import Settings

DECODER = """net (int64[B,S] ids, float[B,2,P,32] past) => (float[B,S,256] y, float[B,2,T,32] present) {
    [embed] x = Gather(table, ids)
    [key] k0 = MatMul(x, wk)
    [heads] k1 = Reshape(k0, split)
    [turn] k = Transpose<perm = [0, 2, 1, 3]>(k1)
    [cache] present = Concat<axis = 2>(past, k)
    [back] kt = Transpose<perm = [0, 1, 3, 2]>(present)
    [scores] s = MatMul(k, kt)
    [softmax] p = Softmax(s)
    [attend] a = MatMul(p, present)
    [unturn] a1 = Transpose<perm = [0, 2, 1, 3]>(a)
    [join] a2 = Reshape(a1, joined)
    [up] u = MatMul(a2, wu)
    [relu] r = Relu(u)
    [down] y = MatMul(r, wd)
}"""


AS_EXPORTED = {
    "[B,S] ids, ": "[1,S] input_ids, int64[1,T] attention_mask, ",
    "[B,": "[1,",
    "P,32] past)": "P,32] past_key_values_0_key)",
    "(table, ids)": "(table, input_ids)",
    "(past, k)": "(past_key_values_0_key, k)",
    "s = MatMul(k, kt)": "s0 = MatMul(k, kt) hides = Cast<to = 1>(attention_mask) s = Mul(s0, hides)",
}


def exported() -> onnx.ModelProto:
    """The decoder with the inputs that exporters give it."""
    text = DECODER
    for name, other in AS_EXPORTED.items():
        text = text.replace(name, other)
    proto = decoder(text, 64).to_proto().SerializeToString()
    return onnx.load_from_string(proto.replace(b"past_key_values_0_key", b"past_key_values.0.key"))


def decoder(text: str = DECODER, tokens: int = 50) -> Model:
    """A layer of a language model with its cache; batch, sequence and past are open."""
    constants = {
        "table": normal(tokens, 64), "wk": normal(64, 64, scale=0.1), "wu": normal(64, 256, scale=0.1),
        "wd": normal(256, 256, scale=0.1), "split": np.array([0, 0, 2, 32]), "joined": np.array([0, 0, 64]),
    }  # fmt: skip
    return build(text, constants)


def call_of(tokens: int, past: int, batch: int = 1) -> Arrays:
    ids = np.random.default_rng(tokens).integers(0, 50, (batch, tokens))
    return {"ids": ids, "past": normal(batch, 2, past, 32, seed=past)}


def written(folder: Path, model: Model, calls: Mapping[str, Arrays]) -> Path:
    for name, arrays in calls.items():
        np.savez(folder / f"{name}.npz", **arrays)
    save(model, folder / "model.onnx")
    return folder / "model.onnx"


def settings(model: Path, weights: Mapping[str, float], **changes: Any) -> Settings:
    files = tuple(WorkloadFile(model.with_name(f"{name}.npz"), weight) for name, weight in weights.items())
    base = Settings(
        model, output_dir=model.parent / "out", engine=EngineSpec("fake"),
        calibration=Calibration(), workloads=files, builds=6,
        accuracy_samples=2, plan=Plan(turn_seconds=0.0), min_sqnr=None,
    )  # fmt: skip
    return replace(base, **changes)


CALLS = {"decode": call_of(1, 15), "prefill": call_of(64, 0)}
WEIGHTS = {"decode": 8.0, "prefill": 2.0}


def cost(file: Path, call: Arrays) -> float:
    return latency(onnx.load(file), inputs=call)


def mean(file: Path) -> float:
    return sum(share * cost(file, CALLS[name]) for name, share in (("decode", 0.8), ("prefill", 0.2)))

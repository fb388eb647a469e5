"""Caches of another export of a network are refused or doubted; those of the same file, simplified or not, are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from qdqtune.calibration.caches import Cache
from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.matching import Matched, from_file, match
from qdqtune.calibration.other_exports import NUMBERED, Shift, shift_of
from qdqtune.calibration.scales import Calibration, Range
from qdqtune.errors import BadData
from qdqtune.graph.loading import identities, load
from qdqtune.graph.model import Model
from workers import in_process


@pytest.fixture(autouse=True, scope="module")
def no_processes() -> Iterator[None]:
    """ONNX Runtime calibrates in this process, for Hypothesis takes no `workers` that end with each test."""
    with in_process():
        yield


LAYERS = st.lists(st.sampled_from(["conv", "relu", "pool", "sigmoid", "reshape", "identity"]), min_size=12, max_size=40)


def exported(layers: list[str], name: Callable[[int], str], folder: Path, file: str = "model.onnx") -> Path:
    """A chain of layers whose tensors and constants are numbered in the order in which an exporter meets them."""
    rng, nodes, constants, number, tensor = np.random.default_rng(len(layers)), [], [], 3, "image"

    def fresh(array: np.ndarray | None = None) -> str:
        nonlocal number
        number += 1
        if array is not None:
            constants.append(numpy_helper.from_array(array, name(number)))
        return name(number)

    for place, layer in enumerate(layers):
        inputs, attributes = [tensor], {}
        if layer == "conv":
            loudness = 10.0 ** rng.uniform(-1, 1)
            inputs.append(fresh((loudness * rng.standard_normal((4, 4, 1, 1))).astype(np.float32)))
        elif layer == "reshape":
            inputs.append(fresh(np.array([1, 4, 4, 4])))
        elif layer == "pool":
            attributes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
        op = {"conv": "Conv", "pool": "MaxPool"}.get(layer, layer.capitalize())
        tensor = fresh()
        nodes.append(helper.make_node(op, inputs, [tensor], f"{op}_{place}", **attributes))
    nodes.append(helper.make_node("Exp", [tensor], ["result"], "end"))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4, 4, 4]) for n in ("image", "result")]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), folder / file)
    return folder / file


def cache_of(file: Path) -> Cache:
    """What a calibrator writes for a file: also tensors that simplification removes."""
    model = load(file)
    seen = calibrate(model, [sample()], Calibration("minmax")).activations
    names = {n: t for n, t in identities(file).items() if t in seen} | {t: t for t in seen}
    return Cache("a test", {n: Range(-seen[t].magnitude, seen[t].magnitude) for n, t in names.items()}, {}, "")


def sample() -> dict[str, np.ndarray]:
    return {"image": np.random.default_rng(0).standard_normal((1, 4, 4, 4)).astype(np.float32)}


def matched(cache: Cache, file: Path) -> Matched:
    model = load(file)
    return match(cache, model, identities(file)).seen_on(model, [sample()])


PLAIN: Mapping[str, Callable[[int], str]] = {"plain": str, "onnx": "onnx::Op_{}".format, "input": "input.{}".format}


@settings(max_examples=8, deadline=None)
@given(layers=LAYERS, shift=st.integers(1, 60), sign=st.sampled_from([1, -1]), kind=st.sampled_from(sorted(PLAIN)))
def test_the_cache_of_another_export_is_refused_or_doubted_and_the_own_is_taken(
    tmp_path_factory: pytest.TempPathFactory, layers: list[str], shift: int, sign: int, kind: str
) -> None:
    folder, name, by = tmp_path_factory.mktemp("exports"), PLAIN[kind], sign * shift
    layers = ["conv", *layers, "conv"]
    one = exported(layers, lambda n: name(n + 100), folder)
    other = exported(layers, lambda n: name(n + 100 + by), folder, "other.onnx")
    own = cache_of(one)
    assert matched(own, one).doubts == ()
    told = objection(own, other)
    assert f"{'raised' if by > 0 else 'lowered'} by {shift}" in told or "is it another model" in told


def objection(cache: Cache, file: Path) -> str:
    """The refusal of a cache, or the last note."""
    try:
        return matched(cache, file).notes()[-1]
    except BadData as error:
        return str(error)


@settings(max_examples=6, deadline=None)
@given(layers=LAYERS, gone=st.sets(st.integers(0, 39), max_size=20))
def test_a_cache_from_before_or_after_simplification_is_taken_silently(
    tmp_path_factory: pytest.TempPathFactory, layers: list[str], gone: set[int]
) -> None:
    """Simplification keeps the names of what remains: a cache has entries for more, or lacks some."""
    file = exported(["conv", *layers, "conv"], str, tmp_path_factory.mktemp("simplified"))
    cache, model, same = cache_of(file), load(file), identities(file)
    kept = {n: r for i, (n, r) in enumerate(cache.ranges.items()) if i not in gone}
    fewer = Cache("a test", {**kept, "image": cache.ranges["image"]}, {}, "")
    more = Cache("a test", {**cache.ranges, **{str(n): Range(-1, 1) for n in range(400, 440)}}, {}, "")
    assert not any("numbered" in told or "fit" in told or "relat" in told for told in match(fewer, model, same).doubts)
    assert match(more, model, same).doubts == ()


def test_a_shift_needs_one_kind_of_name_and_fits_better_than_none() -> None:
    tensors = [f"onnx::Conv_{n}" for n in (10, 13, 14, 20, 27)]
    assert shift_of([f"onnx::Conv_{n}" for n in (5, 8, 9, 15, 22)], tensors) == Shift(5, is_clear=True)
    assert shift_of([f"onnx::Relu_{n}" for n in (5, 8, 9, 15, 22)], tensors) is None
    assert shift_of(tensors[:3], tensors) is shift_of(tensors, tensors[:3]) is shift_of([], tensors) is None
    assert shift_of(["/layer1/Conv_output_0", "a"], ["/layer1/Conv_output_1", "b"]) is None
    assert not any(map(NUMBERED.fullmatch, ["/layer1/Conv_output_0", "conv1", "Conv2D__6:0"][::2]))


def test_entries_that_name_filters_and_ranges_that_cannot_be_are_told(tmp_path: Path) -> None:
    file = exported(["conv", "sigmoid", "conv", "sigmoid", "conv", "sigmoid", "conv"], str, tmp_path)
    model: Model = load(file)
    ranges = dict(cache_of(file).ranges)
    filters = [node.inputs[1] for node in model.nodes if node.op == "Conv"]
    loud = {node.outputs[0]: Range(-90, 90) for node in model.nodes if node.op == "Sigmoid"}
    told = " ".join(match(Cache("", {**ranges, **dict.fromkeys(filters, Range(-1, 1))}, {}, ""), model, {}).doubts)
    assert f"4 entries name filters or integers, as {min(filters)!r}" in told
    (told,) = match(Cache("", {**ranges, **loud}, {}, ""), model, {}).doubts
    assert told.startswith("3 of 3 ranges are wider than their operator can give")


def test_the_error_names_the_file_and_the_shift(tmp_path: Path) -> None:
    layers = ["conv", "relu", "pool"] * 6
    cache = cache_of(exported(layers, str, tmp_path, "other.onnx"))
    lines = [f"{n}: {np.float32(r.high / 127).view(np.uint32):08x}" for n, r in cache.ranges.items()]
    (tmp_path / "calib.cache").write_text("\n".join(["TRT-8510-EntropyCalibration2", *lines]))
    file = exported(layers, lambda n: str(n + 12), tmp_path)
    with pytest.raises(BadData, match=r"calib\.cache: .*names fit if each number is raised by 12"):
        from_file(tmp_path / "calib.cache", load(file), file)

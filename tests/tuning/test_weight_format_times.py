"""What is measured once for all candidates: the times of formats of weights, and what rounding does to the outputs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models import build, feeds, normal, ranges
from qdqtune.calibration.scales import Calibration, Ranges
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION
from qdqtune.engines.formats import numeric_format, weight_formats
from qdqtune.engines.runner import as_workloads
from qdqtune.errors import EngineRefused, Failure
from qdqtune.explanation.page import write_report
from qdqtune.graph.model import Model
from qdqtune.numerics.simulation import Sensitivities
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.possible import possible_edges
from qdqtune.timing.ratios import Plan
from qdqtune.tuning import rounding_noise
from qdqtune.tuning import weight_format_times as asked
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.rounding_noise import noise_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Caveat, Store
from qdqtune.tuning.subject import Subject
from qdqtune.types import Edge, Layer, Mix, WeightFormat, Workload
from refusals import or_raise
from runs import rows, write
from weight_only_nets import DYNAMIC, MODEL, SHARES, W8

SIZE = 512


def model(products: int = 2) -> Model:
    """A decode step in little: products of one row, whose weights no cache holds."""
    names = ["x", *(f"t{i}" for i in range(products))]
    nodes = [f"[m{i}] p{i} = MatMul({names[i]}, w{i}) [a{i}] t{i} = Tanh(p{i})" for i in range(products)]
    text = f"net (float[1,{SIZE}] x) => (float[1,{SIZE}] t{products - 1}) {{ {' '.join(nodes)} }}"
    return build(text, {f"w{i}": normal(SIZE, SIZE, scale=0.05, seed=i) for i in range(products)})


def subject(graph: Model) -> Subject:
    known = {"shaped": graph, "numbers": numeric_format("onnxruntime", "int8"), "mix": as_workloads({})}
    return SimpleNamespace(**known, possible=possible_edges(graph, ranges(graph)))


class Telling:
    """An engine that reports what it is told of each product."""

    mix: Mix = ()

    def __init__(self, ms: dict[str, float], apart: Sequence[str] = (), refused: Sequence[str] = ()) -> None:
        self.ms, self.apart, self.refused, self.asked = ms, apart, refused, 0

    def feed(self, _: Any) -> None:
        """Nothing."""

    def report(self, path: Path, *_: Any) -> tuple[Layer, ...]:
        self.asked += 1
        names = [n for n in self.ms if f"{n}_product".encode() in path.read_bytes()]
        if set(names) & set(self.refused):
            raise EngineRefused(Failure("build", "no such type"))
        layers = []
        for name in names:
            for copy, factor in enumerate((0.9, 1.0, 9.0)):
                own, dq = f"{name}_product{copy}", f"{name}_weight{copy}_DequantizeLinear"
                ran = (own,) if name in self.apart else (dq, own)
                layers.append(Layer(own, ran, "", factor * self.ms[name], "compute"))
                layers += [Layer(dq, (dq,), "", 0.1, "quantize")] if name in self.apart else []
        return tuple(layers)


LAYERS = [Layer(name, (name,), "", 1.0, "compute") for name in ("m0", "a0", "m1", "a1")]


def shares_of(tmp_path: Path, telling: Telling, graph: Model, layers: Sequence[Layer] = (), **said: Any) -> Any:
    settings, told = Settings(tmp_path / "m.onnx", **said), lambda: layers or LAYERS
    with Store(tmp_path / "state.yaml", {}) as store:
        return asked.format_shares(subject(graph), settings, telling, store, told)


def test_formats_that_are_refused_not_fused_or_slow_are_not_searched_for(tmp_path: Path) -> None:
    ms = {"float": 1.0} | {s.name: 0.4 for s in weight_formats("onnxruntime")} | {"w4b128": 1.2}
    engine = Telling(ms, apart=["w8"], refused=["w4b32a"])
    found = shares_of(tmp_path, engine, model())
    assert found.keys() == {Edge("w0", "m0", 1), Edge("w1", "m1", 1)}
    dynamic = {s.name for s in weight_formats("onnxruntime") if s.dynamic}  # none where products saturate
    assert {s.name for s in found[Edge("w0", "m0", 1)]} == {"w4b32", "w4b128a", "w8b32", "w8b128"} | dynamic
    assert found[Edge("w0", "m0", 1)][WeightFormat(4, 32)] == pytest.approx(0.4)
    count = engine.asked
    assert shares_of(tmp_path, engine, model()) == found
    assert engine.asked == count  # the store remembers


def test_formats_that_the_machine_lost_are_asked_for_again_by_the_next_run(tmp_path: Path) -> None:
    class Losing(Telling):
        is_short = True

        def report(self, path: Path, *more: Any) -> tuple[Layer, ...]:
            if self.is_short:
                raise EngineRefused(Failure("resources", "no memory"))
            return super().report(path, *more)

    engine = Losing({"float": 1.0, "w8": 0.4})
    assert shares_of(tmp_path, engine, model(), formats=("w8",)) == {}
    engine.is_short = False
    assert shares_of(tmp_path, engine, model(), formats=("w8",)).keys() == {Edge("w0", "m0", 1), Edge("w1", "m1", 1)}


def test_the_time_of_a_product_is_the_sum_over_its_layers_and_its_part_of_shared_ones(tmp_path: Path) -> None:
    class Halving(Telling):
        def report(self, path: Path, *_: Any) -> tuple[Layer, ...]:
            layers = super().report(path)
            floats = [layer for layer in layers if layer.nodes[-1].startswith("float")]
            joined = Layer("floats", tuple(n for layer in floats for n in layer.nodes), "", 3.0, "compute")
            halves = [replace(layer, time_ms=0.3) for layer in layers if layer not in floats for _ in range(2)]
            return (joined, *halves)

    found = shares_of(tmp_path, Halving({"float": 1.0, "w8": 0.6}), model(), formats=("w8",))
    assert found[Edge("w0", "m0", 1)][WeightFormat(8, None)] == pytest.approx(0.6)


def test_dynamic_quantization_takes_the_time_of_its_nodes_and_of_what_they_read(tmp_path: Path) -> None:
    class Split(Telling):
        def report(self, path: Path, *_: Any) -> tuple[Layer, ...]:
            layers = [Layer("x", ("x_DynamicQuantizeLinear",), "", 0.1, "compute")]
            for copy in range(3):
                for name, parts in (("float", [""]), (DYNAMIC.name, ["", "_Cast", "_Mul"])):
                    nodes = (f"{name}_product{copy}{part}" for part in parts)
                    layers += [
                        Layer(node, (node,), "", {DYNAMIC.name: 0.1}.get(name, 1.0), "compute") for node in nodes
                    ]
            return tuple(layers)

    found = shares_of(tmp_path, Split({"float": 1.0, DYNAMIC.name: 0.1}), model(), formats=(DYNAMIC.name,))
    assert found[Edge("w0", "m0", 1)] == {DYNAMIC: pytest.approx(0.4)}


def test_a_product_is_tried_on_the_rows_of_each_workload(tmp_path: Path) -> None:
    mix = tuple(Workload({"x": normal(rows, SIZE)}, share) for rows, share in ((1, 0.75), (64, 0.25)))
    weight = {"w": normal(SIZE, SIZE, scale=0.05)}
    graph = build(f"net (float[N,{SIZE}] x) => (float[N,{SIZE}] y) {{ [m0] y = MatMul(x, w) }}", weight)
    own, asked_of = subject(graph), list[tuple[object, str]]()
    vars(own)["mix"] = mix

    def report(_: Path, given: Mix, __: int, log_name: str) -> None:
        asked_of.append(([(w.inputs["x"].shape[0], w.share) for w in given], log_name))
        raise EngineRefused(Failure("build", "no more to see"))

    settings = Settings(tmp_path / "m.onnx", formats=("w4b32",))
    engine = SimpleNamespace(report=report, feed=lambda _: None, mix=())
    with Store(tmp_path / "state.yaml", {}) as store:
        assert asked.format_shares(own, settings, engine, store, lambda: LAYERS) == {}
    assert asked_of[0] == ([(1, 0.75), (64, 0.25)], f"weight_formats_1+64x{SIZE}x{SIZE}_1")


def test_models_with_nothing_to_gain_are_not_measured(tmp_path: Path) -> None:
    engine = Telling({"float": 1.0})
    small = build("net (float[1,64] x) => (float[1,64] y) { [m0] y = MatMul(x, w) }", {"w": normal(64, 64)})
    assert shares_of(tmp_path, engine, small) == {}
    rest = [Layer("rest", ("a0",), "", 100.0, "compute"), *LAYERS]
    assert shares_of(tmp_path, engine, model(), rest) == {}
    assert shares_of(tmp_path, engine, model(), formats=("int8",)) == {}
    assert shares_of(tmp_path, engine, model(), engine=EngineSpec("fake")) == {}
    assert engine.asked == 0


@pytest.mark.usefixtures("workers")
def test_a_run_of_weights_alone_ends_to_end_and_goes_on(tmp_path: Path) -> None:
    """ONNX Runtime, one thread. Whatever wins, nothing carries a pair, and the same command asks nothing again."""
    path = write(model(4), tmp_path)
    quick = {
        "plan": Plan((12,), turn_seconds=0.001),
        "proof": (12,),
        "calibration": Calibration(),
        "threads": (1,),
    }
    settings = Settings(
        path, output_dir=tmp_path / "out", formats=("w8", "w4"), builds=6, min_sqnr=15.0, rewrites="off", **quick
    )
    result = tune(settings)
    tried = {t.proposal.origin: t for t in result.history}
    assert "weights in 8 bits" in tried
    assert all(not t.placement.edges and t.placement.weight_only for t in result.history)
    assert tried["weights in 8 bits"].exactness > 30
    shipped = read_placement_file(tmp_path / "out" / "placement.yaml").placement
    assert shipped == result.placement
    assert "a0" in write_report(tmp_path / "out", {}).read_text()
    again = tune(settings)
    assert [t.placement for t in again.history] == [t.placement for t in result.history]
    head = rows(tmp_path / "out" / "autotuner_state.yaml")[0]
    assert head["fingerprint"]["formats"] == ["w8", "w4"]


def run_of(tmp_path: Path, **more: Any) -> Run:
    """A run on a model of products alone."""
    subject = SimpleNamespace(
        shaped=MODEL,
        ranges=Ranges({}),
        numbers=numeric_format("onnxruntime", "int8"),
        possible=frozenset(),
        accuracy=feeds(MODEL),
    )
    usual = {
        "subject": subject,
        "settings": SimpleNamespace(front=True, model=write(MODEL, tmp_path)),
        "limits": SimpleNamespace(are_set=False, max_noise=None),
        "budget": SimpleNamespace(is_late=False, builds=1, deadline=None),
        "bench": SimpleNamespace(trial_seconds=1.0),
        "observer": Silent(),
        "execution": EXECUTION,
    }
    return SimpleNamespace(**usual | more)


@pytest.mark.parametrize(("deadline", "is_cut_short"), [(None, False), (0.0, True)])
def test_tensors_that_a_time_budget_could_not_tell_apart_are_measured_again(deadline, is_cut_short, tmp_path):
    run, caveat = run_of(tmp_path, budget=SimpleNamespace(builds=1, deadline=deadline)), Caveat()
    assert rounding_noise._Alone(run, 0.0, 0.5).measured("storing weights", dict.fromkeys(SHARES, W8), caveat)
    assert caveat == Caveat(is_hurried=is_cut_short)


def test_noise_that_cannot_be_measured_counts_the_same_for_all_and_is_not_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rounding_noise, "each_value", lambda *_, **__: {})
    monkeypatch.setattr(rounding_noise, "sensitivities", lambda *_, **__: or_raise(Failure("run", "no kernel")))
    with Store(tmp_path / "state.yaml", {}) as store:
        run = run_of(tmp_path, store=store)
        vars(run.subject)["possible"] = frozenset({Edge("x", "n", 0)})
        assert rounding_noise._Alone(run, 0.0, 0.5).tensors() == {"x": 1.0}
        assert store.values("sensitivity:", Sensitivities) == {"0": Sensitivities({})}


@pytest.mark.usefixtures("workers")
def test_that_of_dynamic_quantization_includes_the_activations(tmp_path: Path) -> None:
    dynamic = WeightFormat(8, dynamic=True)
    shares = {edge: {W8: 0.6, dynamic: 0.4} for edge in SHARES}
    with Store(tmp_path / "state.yaml", {}) as store:
        noise = noise_of(run_of(tmp_path, format_shares=shares, store=store))
    for edge in SHARES:
        assert 1.1 * noise.of_weight(edge, W8) < noise.of_weight(edge, dynamic) < 10 * noise.of_weight(edge, W8)

"""How runs go on: after a kill, with another budget, or from a finished result; and which changes are refused."""

import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from conftest import Call
from models import FORMATS, conv_net
from qdqtune.calibration.scales import Calibration, Range, Ranges
from qdqtune.engines import EngineSpec
from qdqtune.engines.formats import numeric_format
from qdqtune.errors import BadModel, BadState, EngineFailure
from qdqtune.numerics import fitting
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search.region import Config
from qdqtune.timing.ratios import Plan
from qdqtune.tuning import store
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.store import line_of
from qdqtune.types import Placement, Trial
from runs import environment, hopeless, mixed, rows, settings, timeless, without_seconds, write
from workers import Build, Workers, in_process

pytestmark = pytest.mark.usefixtures("workers")


def command(model: Path, out: Path, *more: str) -> list[str]:
    data = ["--calibration-data", str(model.with_suffix(".npz"))]
    fake = ["--engine", "fake", "--engine-option", "asymmetric=true"]
    search = ["--mode", "region", "--builds", "24", "--calibration-method", "minmax", "--no-bias-correction"]
    return ["tune", str(model), "-o", str(out), "--no-report", *search, *data, *fake, *more]


def killed(model: Path, out: Path, records: int) -> bytes:
    """Kill a run, with an order of sets of its own, when the state file has that many records: what it held by then."""
    slow = ("--engine-option", "build_seconds=0.05")  # so that the run cannot end before the signal comes
    state = out / STATE
    with subprocess.Popen(
        [sys.executable, "-m", "qdqtune", *command(model, out, *slow)],
        env=environment() | {"PYTHONHASHSEED": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as run:  # fmt: skip
        while not state.exists() or state.read_bytes().count(b"\n") < records:
            assert run.poll() is None, "it ended too early"
            time.sleep(0.01)
        before = state.read_bytes()
        run.kill()
    return before[: before.rfind(b"\n") + 1]


def test_a_run_that_is_killed_ends_with_the_same_files(model: Path, call: Call) -> None:
    whole, out = model.parent / "whole", model.parent / "out"
    assert call(*command(model, whole))[0] == 0
    held = killed(model, out, 8)
    assert (out / STATE).read_bytes().startswith(held)
    assert timeless((whole / STATE).read_bytes()).startswith(timeless(held))
    assert not (out / "optimized_final.onnx").exists()
    assert call(*command(model, out))[0] == 0
    for name in ("autotuner_state_pattern_cache.yaml", "baseline.onnx", "optimized_final.onnx", "placement.yaml"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert timeless((out / STATE).read_bytes()) == timeless((whole / STATE).read_bytes())


def test_a_calibration_that_was_interrupted_while_biases_were_corrected_keeps_its_ranges(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(write(conv_net(), model.parent), calibration=Calibration("mse", bias_correction=True))
    whole = tune(replace(asked, output_dir=model.parent / "whole"))
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "_with_biases", Mock(side_effect=EngineFailure("stopped")))
        with pytest.raises(EngineFailure):
            tune(asked)
    monkeypatch.setattr(fitting.Prepared, "ranges", Mock(side_effect=AssertionError))
    assert tune(asked).history == whole.history


def test_a_larger_budget_goes_on_where_the_smaller_one_ended(model: Path) -> None:
    whole = tune(settings(model, builds=32, cut_seed=True, output_dir=model.parent / "whole"))
    for builds in (4, 13, 18, 32):
        part = tune(settings(model, builds=builds, cut_seed=True))
        assert part.history[:-4] == whole.history[: len(part.history[:-4])]
    assert part.history == whole.history
    states = (rows(model.parent / name / STATE) for name in ("out", "whole"))
    trials, expected = ([row["key"] for row in state if row["kind"] == "trial"] for state in states)
    assert trials == expected


CHANGES: dict[str, Any] = {
    "model": lambda model: write(mixed(seed=1), model.parent),
    "calibration data": lambda model: write(mixed(), model.parent, count=4),
    "calibration method": {"calibration": Calibration("percentile", 99.9)},
    "seed": {"seed": 1},
    "quant type": {"quant_type": "fp8"},
    "rewrites": {"rewrites": "off"},
    "engine numbers": {"engine": EngineSpec("fake", {"asymmetric": True})},
    "regions": {"regions": "topology"},
    "node filter": {"node_filter": ("first",)},
    "input shapes": {"input_shapes": {"x": (8, 8, 64)}},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    """A finished run, and its state."""
    with in_process():
        model = write(mixed(), tmp_path_factory.mktemp("done"))
        tune(settings(model, builds=4))
        yield model, (model.parent / "out" / STATE).read_bytes()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_matters_is_refused_by_its_name(done: tuple[Path, bytes], tmp_path: Path, name: str) -> None:
    _, state = done
    model = write(mixed(), tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STATE).write_bytes(state)
    change = CHANGES[name]
    if callable(change):
        change(model)
        change = {}
    with pytest.raises(BadState) as refusal:
        tune(settings(model, builds=4, **change))
    told = str(refusal.value).replace("`", "").replace("_", " ")
    assert re.search(f"was made with (another )?{re.escape(name)}[ ,]", told)
    assert len(str(refusal.value).splitlines()) == 1
    assert (tmp_path / "out" / STATE).read_bytes() == state
    assert tune(settings(model, builds=4, restart=True, **change)).history


@pytest.mark.parametrize(
    "change",
    [
        {"builds": 6},
        {"time_budget": 100.0},
        {"time_limit": 9.0},
        {"min_sqnr": 30.0},
        {"config": Config(schemes_per_region=9)},
        {"plan": Plan((7, 20), 0.02, turn_seconds=0.0)},
        {"plan": Plan((12, 24, 48, 96), turn_seconds=0.0)},
    ],
)
def test_budgets_and_limits_may_change(done: tuple[Path, bytes], change: dict[str, Any]) -> None:
    model, state = done
    assert tune(settings(model, **{"builds": 4, **change})).history
    assert (model.parent / "out" / STATE).read_bytes().startswith(state)


MODES: dict[str, dict[str, Any]] = {
    "cut": {"builds": 8, "mode": "cut"},
    "region": {"builds": 16, "mode": "region"},
    "subgraph": {"builds": 8, "mode": "subgraph"},
    "front": {"builds": 25, "mode": "cut", "front": True},
}


def run(model: Path, mode: str = "cut") -> Result:
    return tune(settings(model, **MODES[mode]))


def left(model: Path) -> dict[str, bytes]:
    out = model.parent / "out"
    return {
        str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file() and p.suffix != ".log"
    }


TIMED = {"summary.json", "run.json", "autotune_cache.json"}
"""Files that hold seconds, or the lines of the state file as far as it was written."""


def untimed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without models of groups either, whose constants lie in one file in the order of writing."""
    return {n: c for n, c in files.items() if Path(n).name not in TIMED and not n.startswith("subgraphs/")}


def timeless_result(result: Result) -> Result:
    return replace(result, summary=without_seconds(result.summary))


@pytest.mark.parametrize("mode", [*MODES, "in time", "hopeless"])
def test_a_finished_run_measures_nothing_again(model: Path, workers: Workers, mode: str) -> None:
    if mode == "hopeless":
        write(hopeless(), model.parent)
    given = settings(model, **MODES.get(mode, MODES["cut"] | {"time_budget": 1e6 if mode == "in time" else None}))
    first, before = tune(given), left(model)
    assert first.improved == (mode != "hopeless")
    workers.builds.clear()
    again = tune(given)
    assert not workers.builds
    assert untimed(left(model)) == untimed(before)
    assert timeless_result(again) == timeless_result(first)


def test_changed_or_missing_results_are_written_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model)
    before = untimed(left(model))
    for name, how in (("optimized_final.onnx", "gone"), ("placement.yaml", "changed"), ("deploy/run.py", "gone")):
        path = model.parent / "out" / name
        path.unlink() if how == "gone" else path.write_bytes(path.read_bytes().replace(b"a", b"b"))
        run(model)
        assert untimed(left(model)) == before
    before = left(model)  # and a version that makes other candidates ships nothing else
    monkeypatch.setattr(store, "VERSION", store.VERSION + 1)
    with pytest.raises(BadState, match="no state file of this version"):
        run(model)
    assert left(model) == before


@pytest.mark.parametrize("mode", ["cut", "front"])
def test_a_proof_of_other_files_does_not_count(model: Path, workers: Workers, mode: str) -> None:
    """As if insertion had changed and nobody had raised its version."""
    first = run(model, mode)
    state = model.parent / "out" / STATE
    lines = [{name: value for name, value in row.items() if name not in ("kind", "of")} for row in rows(state)]
    for line in lines:
        line["key"] = line["key"].replace("race:", "race:0")
    state.write_bytes(b"".join(map(line_of, lines)))
    workers.builds.clear()
    assert run(model, mode).ratio == first.ratio
    paths = [build.path for build in workers.builds]
    assert sum(path.name == "optimized_final.onnx" for path in paths) >= 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, ...]:
    """What a run finds whose files stay as they are."""
    with in_process():
        return run(write(mixed(), tmp_path_factory.mktemp("undisturbed"))).history


@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
@pytest.mark.parametrize("when", ["trial_001", "final_1_optimized_final"])
def test_weights_that_change_while_a_run_is_on_are_noticed(model, workers, undisturbed, how, when):
    weights = model.parent / "weights.bin"
    onnx.save(onnx.load(model), model, save_as_external_data=True, location=weights.name, size_threshold=0)
    whole = weights.read_bytes()

    def meddle(build: Build) -> str | None:
        if build.log.stem == when:
            if how == "gone":
                weights.unlink()
            else:
                weights.write_bytes(whole[:100] if how == "cut" else bytes(len(whole)))
        return None

    workers.refused = meddle
    with pytest.raises(BadModel, match=r"weights\.bin.* has changed|weights\.bin: No such file") as told:
        run(model)
    assert len(str(told.value).splitlines()) == 1
    assert not (model.parent / "out" / "optimized_final.onnx").exists()
    weights.write_bytes(whole)
    workers.refused = lambda _: None
    found = run(model)
    assert found.improved
    assert found.history == undisturbed


CANDIDATES = {
    "uint8": "ad3d7ce7b5557560",
    "plain": "6094c97e59fc2856",
    "reduced": "a6a35afe72d3cb80",
    "int8": "882861698d1c4463",
    "fp8": "6866b049deea2869",
    "16 bits": "f5c1cbfd2e4a565e",
}
"""What insertion made of one network when `store.VERSION` was given its number."""


@pytest.mark.parametrize("name", [*FORMATS, "16 bits"])
def test_candidates_are_those_of_their_version(name: str) -> None:
    """Where this fails on purpose, raise `store.VERSION`: runs that were begun before must not go on."""
    model = conv_net()
    numbers = numeric_format("qnn", "int8") if name == "16 bits" else FORMATS[name]
    known = {name: Range(-1 - i / 8, 2 + i / 8) for i, name in enumerate(sorted(model.tensors))}
    found = Ranges(known | {"c2": Range(0.0, 0.0)})
    edges = possible_edges(model, found)
    made = Inserter(model, found, numbers).insert(Placement.of(edges, (), edges if numbers.wide else ())).to_proto()
    digest = hashlib.sha256()
    for node in made.graph.node:
        digest.update(f"{node.op_type} {list(node.input)} {list(node.output)} {list(node.attribute)}\n".encode())
    for tensor in sorted(made.graph.initializer, key=lambda t: t.name):
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} ".encode())
        digest.update(numpy_helper.to_array(tensor).astype(np.float64).round(5).tobytes())
    assert digest.hexdigest()[:16] == CANDIDATES[name]

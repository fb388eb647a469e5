"""What ships is what was measured: a finished run measures nothing again, files that changed do not count."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models import FORMATS, conv_net
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines.formats import numeric_format
from qdqtune.errors import BadModel, BadState
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.tuning import store
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from qdqtune.tuning.store import line_of
from qdqtune.types import Placement, Trial
from runs import hopeless, mixed, rows, settings, without_seconds, write
from workers import Build, Workers, in_process

STATE = "autotuner_state.yaml"
MODES: dict[str, dict[str, Any]] = {
    "cut": {"builds": 8, "mode": "cut"},
    "region": {"builds": 16, "mode": "region"},
    "subgraph": {"builds": 8, "mode": "subgraph"},
    "front": {"builds": 25, "mode": "cut", "front": True},
}
pytestmark = pytest.mark.usefixtures("workers")


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
def test_weights_that_change_while_a_run_is_on_are_noticed(
    model: Path, workers: Workers, undisturbed: tuple[Trial, ...], how: str, when: str
) -> None:
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

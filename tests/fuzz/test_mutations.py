"""Damaged and made up files: a promised exit code, one line, nothing of the user's changed, nothing left behind.

`pytest tests/fuzz --fuzz 5000 -n 2` runs that many cases; `--fuzz-from` says where to begin.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import mutations
from qdqtune.tuning.store import line_of

CASES = 16
"""Cases in every run of the tests: always the same."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        option = metafunc.config.getoption
        first = option("--fuzz-from")
        metafunc.parametrize("seed", range(first, first + (option("--fuzz") or CASES)))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mutations.whole(tmp_path_factory.mktemp("whole"))


def test_any_file_ends_in_one_line_and_changes_nothing(base: Path, tmp_path: Path, seed: int) -> None:
    own = tmp_path / "case"
    own.mkdir()
    case = mutations.case(seed, base, own)
    assert not mutations.judged(case, base, own), case


def without_nodes(model: onnx.ModelProto) -> None:
    del model.graph.node[:]
    model.graph.output[0].CopyFrom(model.graph.input[0])


def with_a_scalar(model: onnx.ModelProto) -> None:
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(product.output[0], 1, []))


@pytest.mark.parametrize(
    ("change", "command"),
    [
        (without_nodes, "compare {float} {file} --engine fake --calibration-data {data}"),
        (with_a_scalar, "debug {file} {base}/mixed_quantized.onnx --calibration-data {data}"),
    ],
)
def test_models_that_long_runs_have_found(
    base: Path, tmp_path: Path, change: Callable[[onnx.ModelProto], None], command: str
) -> None:
    """One takes no time, and the types that the other lists are wrong."""
    (tmp_path / "case").mkdir()
    case = mutations.Case(command, tmp_path / "case" / "mixed.onnx", change.__name__)
    model = onnx.load(base / "mixed.onnx")
    change(model)
    onnx.save(model, case.path)
    assert not mutations.judged(case, base, tmp_path / "case")


def test_a_run_that_has_measured_pairs_which_the_model_does_not_have(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "case"
    shutil.copytree(base / "front", own / mutations.OUT)
    state = own / mutations.OUT / "autotuner_state.yaml"
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    trial = next(row for row in rows if str(row["key"]).startswith("trial:"))
    trial["value"]["proposal"]["placement"]["edges"] = [["nothing", "nowhere", 0]]
    for row in rows:
        del row["crc"]
    state.write_bytes(b"".join(map(line_of, rows)))
    case = mutations.Case(f"{mutations.TUNE} {mutations.RUNS['front']} -o {{out}}", state, "edges")
    assert not mutations.judged(case, base, own)

"""Damaged and made up files: a promised exit code, one line, nothing of the user's changed, nothing left behind.

`pytest tests/fuzz --fuzz 5000` runs that many cases in processes of their own, and prints the seeds that failed;
`--fuzz-from` says where to begin.
"""

import json
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mutations
from qdqtune.tuning.store import line_of

CASES = 12
"""Cases in every run of the tests: always the same."""

PATIENCE = 600.0
"""Seconds after which a case of a long run counts as hanging."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mutations.whole(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> range:
    """The seeds of a long run."""
    count, first = request.config.getoption("--fuzz"), request.config.getoption("--fuzz-from")
    if not count:
        pytest.skip("a long run: --fuzz N")
    return range(first, first + count)


@settings(max_examples=CASES, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_file_ends_in_one_line_and_changes_nothing(base: Path, seed: int) -> None:
    with TemporaryDirectory() as folder:
        own = Path(folder) / "case"
        own.mkdir()
        case = mutations.case(seed, base, own)
        wrong = mutations.judged(case, base, own)
        assert not wrong, f"{case}: {wrong}"


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
    trial["value"]["placement"]["edges"] = [["nothing", "nowhere", 0]]
    for row in rows:
        del row["crc"]
    state.write_bytes(b"".join(map(line_of, rows)))
    case = mutations.Case(f"{mutations.TUNE} {mutations.RUNS['front']} -o {{out}}", state, "edges")
    assert not mutations.judged(case, base, own)


def outcomes(seeds: range, base: Path, folder: Path) -> Iterator[tuple[int, list[str]]]:
    """What is wrong with each case. Where a process dies or hangs, another one goes on behind that case."""
    context = multiprocessing.get_context("spawn")
    while seeds:
        ours, theirs = context.Pipe()
        process = context.Process(target=mutations.apart, args=(seeds, base, folder, theirs))
        process.start()
        theirs.close()
        for seed in seeds:
            seeds = range(seed + 1, seeds.stop)
            try:
                wrong: list[str] | None = ours.recv() if ours.poll(PATIENCE) else None
            except EOFError:
                process.join()
                code = process.exitcode or 0
                yield seed, [f"it died of {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"]
                break
            yield seed, ["it hangs"] if wrong is None else wrong
            if wrong is None:
                break
        process.kill()
        process.join()


def test_a_long_run(base: Path, cases: range, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failed: list[int] = []
    with capfd.disabled():
        for seed, wrong in outcomes(cases, base, tmp_path):
            if wrong:
                failed.append(seed)
                told = "\n    ".join(wrong).encode(errors="backslashreplace").decode()
                print(f"\nseed {seed}: {told}", flush=True)
        print(f"\n{len(cases)} cases from {cases.start}, {len(failed)} failed: {failed}", flush=True)
    assert not failed

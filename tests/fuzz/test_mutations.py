"""Damaged and made up files: a promised exit code, one line, nothing of the user's changed, nothing left behind.

`pytest tests/fuzz --fuzz 5000` runs that many cases in processes of their own, and prints the seeds that failed;
`--fuzz-from` says where to begin.
"""

import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mutations

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
@example(seed=0)
@example(seed=7400493)  # what long runs have found: a model without nodes, which takes no time,
@example(seed=7401040)  # a list of types by which a product is a scalar,
@example(seed=81212077)  # a run that has measured pairs which the model does not have
def test_any_file_ends_in_one_line_and_changes_nothing(base: Path, seed: int) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "case").mkdir()
        made, wrong = mutations.run(seed, base, Path(folder) / "case")
        assert not wrong, f"{made}: {wrong}"


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

"""Builds, candidates and models are told alike wherever people read of them."""

import io
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from qdqtune.calibration.inputs import input_specs
from qdqtune.cli.progress import Progress
from qdqtune.commands.tune import result_table
from qdqtune.explanation.formatting import built
from qdqtune.explanation.report import report_of_run
from qdqtune.graph.loading import load
from qdqtune.numerics.accuracy import slice_cell
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Observers
from qdqtune.types import Accuracy
from runs import mixed, settings, write

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize(("mode", "count"), list(product(["cut", "region", "subgraph"], [5, 9])))
def test_a_run_has_one_count_of_builds_and_candidates_without_holes(mode: str, count: int, tmp_path: Path) -> None:
    asked = settings(write(mixed(), tmp_path), mode=mode, builds=count, output_dir=tmp_path / "out")
    written = [io.StringIO(), io.StringIO()]
    moving, plain = (Progress(Console(file=file, width=200), is_moving=file is written[0]) for file in written)
    result = tune(asked, Observers([moving, plain]))
    for file in written:
        lines = re.findall(r"^ +(\d+) +(\d+)/(\d+) builds  best", file.getvalue(), re.MULTILINE)
        assert [int(number) for number, *_ in lines] == list(range(1, len(result.history) + 1))
        assert {int(limit) for *_, limit in lines} <= {count}
        told = [f"builds: {spent}" for _, spent, _ in lines[-1:]]
    caption = result_table(result).caption
    assert built(result.summary) in caption
    assert all(words in caption for words in told)
    page = report_of_run(tmp_path / "out")
    assert any(built(result.summary) in fact.hint for fact in page.facts)
    assert [one.number for one in page.candidates] == list(range(1, len(result.history) + 1))


def test_the_worst_slice_of_what_ships_is_in_table_and_report(tmp_path: Path) -> None:
    result = tune(settings(write(mixed(), tmp_path), mode="cut", builds=8, output_dir=tmp_path / "out"))
    assert result.improved
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    told = slice_cell(Accuracy(**summary["output_accuracy"]))
    assert re.fullmatch(r"y\[.*\] \d+\.\d dB", told)
    assert ("  of the worst slice", "", told) in result_table(result).rows
    assert ("of the worst slice", told) in [(fact.name, fact.value) for fact in report_of_run(tmp_path / "out").facts]


def test_what_the_fastest_candidate_missed_is_told_with_what_was_compared(tmp_path: Path) -> None:
    source = write(mixed(), tmp_path)
    samples = np.random.default_rng(0).normal(size=(40, *input_specs(load(source))[0].shape[1:])).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=samples)
    asked = settings(
        source, calibration_data=str(tmp_path / "samples.npz"), output_dir=tmp_path / "out", min_sqnr=190.0
    )
    result = tune(asked)
    assert not result.improved
    without = result.summary["fastest_without_limits"]
    assert re.fullmatch(r"the output SQNR of all samples is [\d.]+ dB, and 190 dB are asked for", without["missed"])
    _, missed, compared, told = (result_table(result).caption or "").splitlines()
    assert missed == f"the fastest without limits was not taken: {without['missed']}"
    assert compared.startswith("outputs compared on ")
    assert told == result.summary["scores_told"]
    assert any(without["missed"] in note for note in report_of_run(tmp_path / "out").notes)
